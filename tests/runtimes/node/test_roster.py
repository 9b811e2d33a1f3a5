"""The roster: who serves, who is doubted, who is given up; alone and in thousands of random histories.

ROSTER_HISTORIES asks for more of these.
"""

from __future__ import annotations

import os
import random

import pytest

from runtimes.node.membership import (
    LEGAL_NODE_MOVES,
    Admitted,
    CountedOut,
    DrainAsked,
    DrainEnded,
    Emptied,
    Expected,
    FoundUnfit,
    Greeted,
    LinkLost,
    NodeState,
    RaySaid,
    Reconciled,
    Roster,
    RosterEvent,
    RosterSettings,
    SaidGoodbye,
    Serves,
    Shut,
    Ticked,
    TurnedAway,
    Verdict,
)

HISTORIES = int(os.environ.get("ROSTER_HISTORIES", "1000"))
SLICES = 10
SETTINGS = RosterSettings()


def kinds(verdicts: list[Verdict]) -> list[type[Verdict]]:
    return [type(verdict) for verdict in verdicts]


def joined(*names: str, roster: Roster | None = None, now_s: float = 0.0) -> Roster:
    """A roster on which these nodes are ready."""
    roster = roster or Roster()
    for name in names:
        assert kinds(roster.step(now_s, Greeted(name, f"{name}-1"))) == [Admitted]
        assert kinds(roster.step(now_s, Reconciled(name, f"{name}-1"))) == [Serves]
    return roster


def state(roster: Roster, name: str = "n") -> NodeState:
    member = roster.get(name)
    assert member is not None
    return member.state


def test_a_node_serves_only_when_what_it_holds_is_known() -> None:
    roster = Roster()
    assert roster.step(0, Greeted("n", "i")) == [Admitted("n", "i", fence=False)]
    assert state(roster) is NodeState.JOINING
    assert roster.step(1, Reconciled("n", "i")) == [Serves("n")]
    assert state(roster) is NodeState.READY


def test_a_node_that_is_not_heard_is_doubted_and_back_as_it_was_when_it_joins_again() -> None:
    roster = joined("n")
    assert kinds(roster.step(5, LinkLost("n", "n-1", "silent"))) == [Shut]
    assert roster.step(64.9, Greeted("n", "n-2")) == [Admitted("n", "n-2", fence=False)]
    assert roster.step(65.5, Reconciled("n", "n-2")) == [Serves("n")]


def test_a_node_that_stays_silent_is_lost_and_must_end_all_before_it_joins_again() -> None:
    roster = joined("n", "m")
    roster.step(5, LinkLost("n", "n-1", "silent"))
    assert roster.next_s() == 65.0
    assert roster.step(64.999, Ticked()) == []
    (gone,) = roster.step(65, Ticked())
    assert gone == CountedOut("n", "not heard for 60 s (silent)", victims=True)
    assert roster.step(70, Greeted("n", "n-1")) == [Admitted("n", "n-1", fence=True)]
    assert roster.step(70, LinkLost("n", "n-1", "cut")) == [Shut("n", "suspect: cut")]
    assert roster.step(71, Greeted("n", "n-1")) == [Admitted("n", "n-1", fence=True)], "it may not have obeyed"
    roster.step(72, Reconciled("n", "n-1"))
    roster.step(73, LinkLost("n", "n-1", "cut"))
    assert roster.step(74, Greeted("n", "n-1")) == [Admitted("n", "n-1", fence=False)]


def test_one_that_greets_again_and_again_without_reconciling_is_lost_all_the_same() -> None:
    roster = joined("n", "m")
    roster.step(0, LinkLost("n", "n-1", "silent"))
    for second in range(1, 60, 10):
        assert kinds(roster.step(second, Greeted("n", f"i{second}"))) == [Admitted]
        assert kinds(roster.step(second + 1, LinkLost("n", f"i{second}", "cut"))) == [Shut]
    assert kinds(roster.step(60, Ticked())) == [CountedOut]


def test_a_name_is_one_living_daemons() -> None:
    roster = joined("n")
    (refused,) = roster.step(1, Greeted("n", "other"))
    assert isinstance(refused, TurnedAway) and "a living daemon" in refused.why
    assert state(roster) is NodeState.READY


def test_the_same_daemon_may_come_before_its_old_link_is_known_to_be_dead() -> None:
    roster = joined("n")
    assert kinds(roster.step(1, Greeted("n", "n-1"))) == [Shut, Admitted]
    assert kinds(roster.step(2, Reconciled("n", "n-1"))) == [Serves]


def test_what_is_told_of_an_earlier_daemon_of_the_name_changes_nothing() -> None:
    roster = joined("n")
    roster.step(1, LinkLost("n", "n-1", "killed"))
    roster.step(2, Greeted("n", "n-2"))
    for stale in (LinkLost("n", "n-1", "x"), Reconciled("n", "n-1"), SaidGoodbye("n", "n-1", "x", killed=True)):
        assert roster.step(3, stale) == []
    assert state(roster) is NodeState.JOINING


def test_a_draining_node_is_closed_at_once_and_gone_without_victims_when_it_is_empty() -> None:
    roster = joined("n")
    assert roster.step(1, DrainAsked("n", "maintenance")) == [Shut("n", "draining: maintenance", finishing=True)]
    assert roster.step(2, DrainAsked("n", "again")) == []
    assert roster.step(3, Emptied("n")) == [CountedOut("n", "drained: maintenance", victims=False)]
    assert roster.step(4, Greeted("n", "n-2")) == [Admitted("n", "n-2", fence=False)], "it had nothing to end"


def test_a_draining_node_has_its_grace_and_no_more() -> None:
    roster = joined("n")
    roster.step(1, DrainAsked("n", "spot notice"))
    assert roster.step(600, Ticked()) == []
    (gone,) = roster.step(601, Ticked())
    assert isinstance(gone, CountedOut) and gone.victims


def test_a_drain_outlives_the_link_and_is_taken_back_by_hand() -> None:
    roster = joined("n")
    roster.step(1, DrainAsked("n", "maintenance"))
    roster.step(2, LinkLost("n", "n-1", "cut"))
    roster.step(3, Greeted("n", "n-1"))
    assert roster.step(4, Reconciled("n", "n-1")) == [Serves("n"), Shut("n", "draining: maintenance", finishing=True)]
    assert roster.step(5, DrainEnded("n")) == [Serves("n")]


def test_a_goodbye_that_killed_everything_is_a_loss_at_once_and_any_other_leaves_a_doubt() -> None:
    roster = joined("n", "m")
    assert kinds(roster.step(1, SaidGoodbye("n", "n-1", "kill", killed=True))) == [CountedOut]
    assert kinds(roster.step(1, SaidGoodbye("m", "m-1", "restarted", killed=False))) == [Shut]


def test_what_ray_says_never_outweighs_a_link_that_beats() -> None:
    roster = joined("n")
    assert roster.step(1, RaySaid("n", "raylet: received SIGTERM", final=True)) == []
    assert state(roster) is NodeState.READY
    assert kinds(roster.step(2, LinkLost("n", "n-1", "cut"))) == [Shut, CountedOut], "both say so: no need to wait"


def test_when_ray_only_fears_that_a_node_is_dead_it_has_its_time() -> None:
    roster = joined("n")
    roster.step(1, LinkLost("n", "n-1", "cut"))
    assert roster.step(2, RaySaid("n", "health check failed")) == []


def test_the_silence_of_many_is_the_gateways_own_and_nobody_is_lost_until_it_has_lasted() -> None:
    names = [f"n{number}" for number in range(20)]
    roster = joined(*names)
    for name in names[:3]:
        roster.step(0, LinkLost(name, f"{name}-1", "silent"))
    assert roster.step(60, Ticked()) == []
    assert roster.storm_left_s == 300.0
    assert roster.next_s() == 360.0
    assert kinds(roster.step(100, Greeted("n0", "n0-1"))) == [Admitted]
    roster.step(100, Reconciled("n0", "n0-1"))
    assert roster.step(359.9, Ticked()) == []
    assert sorted(gone.node for gone in roster.step(360, Ticked()) if isinstance(gone, CountedOut)) == ["n1", "n2"]
    assert roster.storm_left_s == 0.0


def test_the_hold_ends_once_nobody_is_silent_any_more() -> None:
    names = [f"n{number}" for number in range(20)]
    roster = joined(*names)
    for name in names[:3]:
        roster.step(0, LinkLost(name, f"{name}-1", "silent"))
    roster.step(60, Ticked())
    for name in names[:3]:
        roster.step(70, Greeted(name, f"{name}-1"))
        assert roster.storm_left_s == 290.0, "it has greeted, and may fall silent before it serves"
    for name in names[:3]:
        assert roster.storm_left_s == 290.0
        roster.step(70, Reconciled(name, f"{name}-1"))
    assert roster.storm_left_s == 0.0
    roster.step(80, LinkLost("n0", "n0-1", "silent"))
    assert kinds(roster.step(140, Ticked())) == [CountedOut], "a single dead machine has its own time"


def test_a_tenth_of_the_nodes_may_be_lost_within_a_minute() -> None:
    names = [f"n{number}" for number in range(20)]
    roster = joined(*names)
    for name in names[:2]:
        roster.step(0, LinkLost(name, f"{name}-1", "silent"))
    assert kinds(roster.step(60, Ticked())) == [CountedOut, CountedOut]
    roster.step(30, LinkLost("n2", "n2-1", "silent"))
    assert roster.step(119, Ticked()) == [], "a third within a minute is one too many"


def test_a_node_that_is_lost_again_and_again_is_refused_for_longer_each_time() -> None:
    roster = joined("n", "m")
    now_s, refused = 0.0, []
    for loss in range(1, 6):
        roster.step(now_s, LinkLost("n", f"i{loss - 1}" if loss > 1 else "n-1", "silent"))
        now_s += 61
        assert kinds(roster.step(now_s, Ticked())) == [CountedOut]
        (verdict,) = roster.step(now_s, Greeted("n", f"i{loss}"))
        if isinstance(verdict, TurnedAway):
            refused.append(verdict.retry_after_s)
            now_s += verdict.retry_after_s
            roster.step(now_s, Greeted("n", f"i{loss}"))
        roster.step(now_s, Reconciled("n", f"i{loss}"))
        assert state(roster) is NodeState.READY
    assert refused == [600.0, 1200.0, 2400.0]


def test_nodes_of_the_gateway_before_are_awaited_as_if_they_were_silent_since_its_start() -> None:
    roster = Roster()
    assert kinds(roster.step(10, Expected("n"))) == [Shut]
    assert kinds(roster.step(11, Greeted("n", "i"))) == [Admitted]
    assert kinds(roster.step(12, Reconciled("n", "i"))) == [Serves]
    roster.step(12, Expected("m", draining=True))
    assert roster.next_s() == 72.0
    assert kinds(roster.step(72, Ticked())) == [CountedOut]


def test_there_are_no_more_nodes_than_the_bound_and_the_longest_lost_is_forgotten_for_a_new_one() -> None:
    roster = joined("a", "b", roster=Roster(RosterSettings(nodes_max=2)))
    assert kinds(roster.step(1, Greeted("c", "c-1"))) == [TurnedAway]
    roster.step(2, SaidGoodbye("a", "a-1", "kill", killed=True))
    assert kinds(roster.step(3, Greeted("c", "c-1"))) == [Admitted]
    assert [member.name for member in roster.members()] == ["b", "c"]


def test_a_node_that_finds_itself_unfit_is_closed_with_its_reason_and_open_again_by_its_own_word() -> None:
    roster = joined("n")
    assert roster.step(1, FoundUnfit("n", "n-1", "its disk is full")) == [Shut("n", "unfit: its disk is full")]
    member = roster.get("n")
    assert member is not None and (member.state, member.why) == (NodeState.UNFIT, "its disk is full")
    assert roster.step(2, FoundUnfit("n", "n-1", "its disk is full")) == [], "told again"
    assert roster.next_s() is None, "time alone does nothing to it"
    assert roster.step(3, FoundUnfit("n", "n-1", "")) == [Serves("n")]
    assert state(roster) is NodeState.READY


def test_one_that_can_take_nothing_new_lets_what_lives_there_go_on_until_it_is_worse_or_better() -> None:
    roster = joined("n")
    shut = Shut("n", "unfit: no engine", finishing=True)
    assert roster.step(1, FoundUnfit("n", "n-1", "no engine", finishing=True)) == [shut]
    assert state(roster) is NodeState.UNFIT
    drains = Shut("n", "draining: asked, and unfit: no engine", finishing=True)
    assert roster.step(2, DrainAsked("n", "asked")) == [drains]
    assert roster.step(3, DrainEnded("n")) == [shut]
    assert roster.step(4, FoundUnfit("n", "n-1", "full")) == [Shut("n", "unfit: full")]
    assert roster.step(5, FoundUnfit("n", "n-1", "")) == [Serves("n")]
    roster.step(6, LinkLost("n", "n-1", "cut"))
    roster.step(7, Greeted("n", "n-1", unfit="no engine", finishing=True))
    assert roster.step(8, Reconciled("n", "n-1")) == [Serves("n"), shut], "so it is when it joins like that"


def test_one_that_drains_when_it_joins_starts_nothing_if_nothing_can_begin_there() -> None:
    roster = Roster()
    roster.step(0, Greeted("n", "i", draining=True, unfit="full"))
    shut = Shut("n", "draining: its daemon drains, and unfit: full")
    assert roster.step(1, Reconciled("n", "i")) == [Serves("n"), shut]


def test_one_that_is_unfit_when_it_joins_never_opens_until_it_is_fit() -> None:
    roster = Roster()
    roster.step(0, Greeted("n", "i", unfit="full"))
    assert roster.step(1, Reconciled("n", "i")) == [Serves("n"), Shut("n", "unfit: full")]
    assert state(roster) is NodeState.UNFIT
    roster.step(2, LinkLost("n", "i", "cut"))
    assert roster.step(3, FoundUnfit("n", "i", "")) == [], "it is not heard: it says so again when it joins"
    roster.step(4, Greeted("n", "i"))
    assert roster.step(5, Reconciled("n", "i")) == [Serves("n")]


def test_an_unfit_node_drains_and_what_it_finds_meanwhile_counts_when_it_is_to_stay_after_all() -> None:
    roster = joined("n")
    roster.step(1, FoundUnfit("n", "n-1", "full"))
    assert kinds(roster.step(2, DrainAsked("n", "asked"))) == [Shut]
    assert state(roster) is NodeState.DRAINING
    assert roster.step(3, DrainEnded("n")) == [Shut("n", "unfit: full")]
    roster.step(4, DrainAsked("n", "asked"))
    goes_on = Shut("n", "draining: asked", finishing=True)
    assert roster.step(5, FoundUnfit("n", "n-1", "")) == [goes_on], "it drains, and what lives there goes on"
    assert roster.step(6, DrainEnded("n")) == [Serves("n")]


def test_a_draining_node_that_turns_unfit_is_shut_to_its_own_trajectories_until_it_is_fit() -> None:
    roster = joined("n")
    drains = Shut("n", "draining: asked", finishing=True)
    assert roster.step(1, DrainAsked("n", "asked")) == [drains]
    assert roster.step(2, FoundUnfit("n", "n-1", "full")) == [Shut("n", "draining: asked, and unfit: full")]
    assert state(roster) is NodeState.DRAINING, "it leaves all the same"
    assert roster.step(3, FoundUnfit("n", "n-1", "full")) == [], "told again"
    assert roster.step(4, FoundUnfit("n", "n-1", "")) == [drains]


# -- any history


class NodeHistory:
    """Random events at random instants, and what must hold after each."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.names = [f"n{number}" for number in range(self.chance.choice((1, 3, 12)))]
        self.settings = RosterSettings(
            storm_share=self.chance.choice((0.1, 0.5)), drain_grace_s=self.chance.choice((10.0, 600.0))
        )
        self.roster = Roster(self.settings)
        self.now_s = 0.0
        self.open: set[str] = set()
        #: How each that was shut was shut last: whether its trajectories go on.
        self.goes_on: dict[str, bool] = {}
        self.admitted: dict[str, str] = {}
        self.must_fence: set[str] = set()
        #: Instants at which silence alone counted somebody out.
        self.silent_losses: list[float] = []

    def run(self, events: int = 60) -> None:
        for _ in range(events):
            self.now_s += self.chance.choice((0.0, 0.1, 1.0, 5.0, 30.0, 61.0, 400.0))
            if self.chance.random() < 0.2 and (next_s := self.roster.next_s()) is not None:
                self.now_s = max(self.now_s, next_s)
            self.tell(self.event())

    def event(self) -> RosterEvent:
        chance, name = self.chance, self.chance.choice(self.names)
        member = self.roster.get(name)
        known = "none" if member is None else member.instance
        instance = known if chance.random() < 0.8 else f"i{chance.randrange(10**6)}"
        fresh = f"i{chance.randrange(10**6)}" if chance.random() < 0.6 else instance
        return chance.choice(
            (
                Greeted(name, fresh, draining=chance.random() < 0.1),
                Greeted(name, fresh, unfit=chance.choice(("", "", "full"))),
                Reconciled(name, instance),
                Reconciled(name, instance),
                FoundUnfit(name, instance, chance.choice(("", "full")), finishing=chance.random() < 0.3),
                LinkLost(name, instance, "cut"),
                Expected(name),
                DrainAsked(name, "asked"),
                DrainEnded(name),
                Emptied(name),
                SaidGoodbye(name, instance, "bye", killed=chance.random() < 0.5),
                RaySaid(name, "dead", final=chance.random() < 0.5),
                Ticked(),
            )
        )

    def tell(self, event: RosterEvent) -> None:
        before = {member.name: member.state for member in self.roster.members()}
        beats = {name for name, was in before.items() if was in (NodeState.READY, NodeState.UNFIT, NodeState.DRAINING)}
        verdicts = self.roster.step(self.now_s, event)
        for verdict in verdicts:
            self.check(verdict, event, before)
        after = {member.name: member.state for member in self.roster.members()}
        assert self.open == {name for name, now in after.items() if now is NodeState.READY}, (event, verdicts)
        if isinstance(event, RaySaid) and before.get(event.node) in (NodeState.READY, NodeState.UNFIT):
            assert event.node in beats and after[event.node] is before[event.node], "Ray ended a node that beats"
        if len(verdicts) <= 1:  # one step, one move
            for name, now in after.items():
                was = before.get(name, NodeState.LOST)
                assert now is was or now in LEGAL_NODE_MOVES[was] or isinstance(event, Expected), (event, was, now)
        for member in self.roster.members():
            if member.state in (NodeState.UNFIT, NodeState.DRAINING):
                can = not member.unfit or member.finishing
                assert self.goes_on[member.name] is can, f"{member}: its trajectories go on as its last word says"
            due = member.state is NodeState.SUSPECT and not self.roster.storm_left_s
            assert not due or self.now_s - member.since_s < self.settings.lost_after_s, f"{member} is overdue"

    def check(self, verdict: Verdict, event: RosterEvent, before: dict[str, NodeState]) -> None:
        match verdict:
            case Admitted():
                assert isinstance(event, Greeted) and verdict.instance == event.instance
                assert verdict.fence == (verdict.node in self.must_fence), "it may run what counts as lost"
                self.admitted[verdict.node] = verdict.instance
            case Serves():
                assert verdict.node in self.admitted, "it serves without a greeting"
                self.must_fence.discard(verdict.node)
                self.open.add(verdict.node)
            case Shut():
                self.open.discard(verdict.node)
                self.goes_on[verdict.node] = verdict.finishing
            case CountedOut():
                self.open.discard(verdict.node)
                self.admitted.pop(verdict.node, None)
                if verdict.victims:
                    self.must_fence.add(verdict.node)
                assert before.get(verdict.node) is not NodeState.LOST, "it was lost already"
                if verdict.why.startswith("not heard"):
                    self.count_silent_loss(len(before))
            case TurnedAway():
                assert verdict.retry_after_s > 0 and verdict.why

    def count_silent_loss(self, known: int) -> None:
        """More than the share within the window are lost only after the hold."""
        self.silent_losses.append(self.now_s)
        recent = [at_s for at_s in self.silent_losses if at_s > self.now_s - self.settings.storm_window_s]
        allowed = max(1, int(self.settings.storm_share * (known + len(recent))))
        if len(recent) > allowed:
            silent_s = [self.now_s - member.heard_s for member in self.roster.members()]
            held_s = self.settings.storm_hold_s
            assert max(silent_s) >= held_s, f"{len(recent)} were lost within a minute, {allowed} may be"


@pytest.mark.parametrize("slice_", range(SLICES))
def test_no_history_breaks_a_promise(slice_: int) -> None:
    for seed in range(slice_, HISTORIES, SLICES):
        try:
            NodeHistory(seed).run()
        except AssertionError as error:
            raise AssertionError(f"{error}\nin the history of seed {seed}") from error
