"""The membership: who serves, who is doubted, who is given up; alone and in thousands of random histories.

MEMBERSHIP_HISTORIES asks for more of these.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from runtimes.node.membership import (
    LEGAL_NODE_MOVES,
    Admitted,
    CountedOut,
    JoinRefused,
    MembershipSettings,
    NodeMembership,
    NodeState,
    Serves,
    Shut,
    Verdict,
)

HISTORIES = int(os.environ.get("MEMBERSHIP_HISTORIES", "1000"))
SLICES = 10
SETTINGS = MembershipSettings()


def kinds(verdicts: list[Verdict]) -> list[type[Verdict]]:
    return [type(verdict) for verdict in verdicts]


def joined(*names: str, membership: NodeMembership | None = None, now_s: float = 0.0) -> NodeMembership:
    """A membership on which these nodes are ready."""
    membership = membership or NodeMembership()
    for name in names:
        assert kinds(membership.greet(now_s, name, f"{name}-1")) == [Admitted]
        assert kinds(membership.reconcile(now_s, name, f"{name}-1")) == [Serves]
    return membership


def state(membership: NodeMembership, name: str = "n") -> NodeState:
    member = membership.get(name)
    assert member is not None
    return member.state


def test_a_node_that_is_not_heard_is_doubted_and_back_as_it_was_when_it_joins_again() -> None:
    membership = NodeMembership()
    assert membership.greet(0, "n", "n-0") == [Admitted("n", "n-0", fence=False)]
    assert state(membership) is NodeState.JOINING, "it serves only when what it holds is known"
    assert kinds(membership.greet(0, "n", "n-0")) == [Shut, Admitted], "before its old link is known to be dead"
    assert membership.reconcile(1, "n", "n-0") == [Serves("n")]
    assert state(membership) is NodeState.READY
    membership = joined("n")
    assert kinds(membership.lose_link(5, "n", "n-1", "silent")) == [Shut]
    assert membership.greet(64.9, "n", "n-2") == [Admitted("n", "n-2", fence=False)]
    assert membership.reconcile(65.5, "n", "n-2") == [Serves("n")]


def test_a_node_that_stays_silent_is_lost_and_must_end_all_before_it_joins_again() -> None:
    membership = joined("n", "m")
    membership.lose_link(5, "n", "n-1", "silent")
    assert membership.next_s() == 65.0
    assert membership.tick(64.999) == []
    (gone,) = membership.tick(65)
    assert gone == CountedOut("n", "not heard for 60 s (silent)", victims=True)
    assert membership.greet(70, "n", "n-1") == [Admitted("n", "n-1", fence=True)]
    assert membership.lose_link(70, "n", "n-1", "cut") == [Shut("n", "suspect: cut")]
    assert membership.greet(71, "n", "n-1") == [Admitted("n", "n-1", fence=True)], "it may not have obeyed"
    membership.reconcile(72, "n", "n-1")
    membership.lose_link(73, "n", "n-1", "cut")
    assert membership.greet(74, "n", "n-1") == [Admitted("n", "n-1", fence=False)]


def test_a_name_is_one_living_daemons() -> None:
    membership = joined("n")
    (refused,) = membership.greet(1, "n", "other")
    assert isinstance(refused, JoinRefused) and "a living daemon" in refused.why
    assert state(membership) is NodeState.READY


def test_what_is_told_of_an_earlier_daemon_of_the_name_changes_nothing() -> None:
    membership = joined("n")
    membership.lose_link(1, "n", "n-1", "killed")
    membership.greet(2, "n", "n-2")
    assert membership.lose_link(3, "n", "n-1", "x") == []
    assert membership.reconcile(3, "n", "n-1") == []
    assert membership.goodbye(3, "n", "n-1", "x", killed=True) == []
    assert state(membership) is NodeState.JOINING


def test_a_draining_node_is_closed_at_once_and_gone_without_victims_when_it_is_empty() -> None:
    membership = joined("n")
    assert membership.drain(1, "n", "maintenance") == [Shut("n", "draining: maintenance", finishing=True)]
    assert membership.drain(2, "n", "again") == []
    assert membership.empty(3, "n") == [CountedOut("n", "drained: maintenance", victims=False)]
    assert membership.greet(4, "n", "n-2") == [Admitted("n", "n-2", fence=False)], "it had nothing to end"


def test_a_draining_node_has_its_grace_and_no_more() -> None:
    membership = joined("n")
    membership.drain(1, "n", "spot notice")
    assert membership.tick(600) == []
    (gone,) = membership.tick(601)
    assert isinstance(gone, CountedOut) and gone.victims


def test_a_drain_outlives_the_link() -> None:
    membership = joined("n")
    membership.drain(1, "n", "maintenance")
    membership.lose_link(2, "n", "n-1", "cut")
    membership.greet(3, "n", "n-1")
    assert membership.reconcile(4, "n", "n-1") == [Serves("n"), Shut("n", "draining: maintenance", finishing=True)]


def test_a_goodbye_that_killed_everything_is_a_loss_at_once_and_any_other_leaves_a_doubt() -> None:
    membership = joined("n", "m")
    assert kinds(membership.goodbye(1, "n", "n-1", "kill", killed=True)) == [CountedOut]
    assert kinds(membership.goodbye(1, "m", "m-1", "restarted", killed=False)) == [Shut]


def test_what_ray_says_never_outweighs_a_link_that_beats() -> None:
    membership = joined("n")
    assert membership.note_ray(1, "n", "raylet: received SIGTERM", final=True) == []
    assert state(membership) is NodeState.READY
    assert kinds(membership.lose_link(2, "n", "n-1", "cut")) == [Shut, CountedOut], "both say so: no need to wait"
    membership = joined("n")
    membership.lose_link(1, "n", "n-1", "cut")
    assert membership.note_ray(2, "n", "health check failed") == [], "what Ray only fears has its time"


def test_the_silence_of_many_is_the_gateways_own_and_nobody_is_lost_until_it_has_lasted() -> None:
    names = [f"n{number}" for number in range(20)]
    membership = joined(*names)
    for name in names[:3]:
        membership.lose_link(0, name, f"{name}-1", "silent")
    assert membership.tick(60) == []
    assert membership.storm_left_s == 300.0
    assert membership.next_s() == 360.0
    assert kinds(membership.greet(100, "n0", "n0-1")) == [Admitted]
    membership.reconcile(100, "n0", "n0-1")
    assert membership.tick(359.9) == []
    assert sorted(gone.node for gone in membership.tick(360) if isinstance(gone, CountedOut)) == ["n1", "n2"]
    assert membership.storm_left_s == 0.0


def test_the_hold_ends_once_nobody_is_silent_any_more() -> None:
    names = [f"n{number}" for number in range(20)]
    membership = joined(*names)
    for name in names[:3]:
        membership.lose_link(0, name, f"{name}-1", "silent")
    membership.tick(60)
    for name in names[:3]:
        membership.greet(70, name, f"{name}-1")
        assert membership.storm_left_s == 290.0, "it has greeted, and may fall silent before it serves"
    for name in names[:3]:
        assert membership.storm_left_s == 290.0
        membership.reconcile(70, name, f"{name}-1")
    assert membership.storm_left_s == 0.0
    membership.lose_link(80, "n0", "n0-1", "silent")
    assert kinds(membership.tick(140)) == [CountedOut], "a single dead machine has its own time"


def test_a_tenth_of_the_nodes_may_be_lost_within_a_minute() -> None:
    names = [f"n{number}" for number in range(20)]
    membership = joined(*names)
    for name in names[:2]:
        membership.lose_link(0, name, f"{name}-1", "silent")
    assert kinds(membership.tick(60)) == [CountedOut, CountedOut]
    membership.lose_link(30, "n2", "n2-1", "silent")
    assert membership.tick(119) == [], "a third within a minute is one too many"


def test_a_node_that_is_lost_again_and_again_is_refused_for_longer_each_time() -> None:
    membership = joined("n", "m")
    now_s, refused = 0.0, []
    for loss in range(1, 6):
        membership.lose_link(now_s, "n", f"i{loss - 1}" if loss > 1 else "n-1", "silent")
        now_s += 61
        assert kinds(membership.tick(now_s)) == [CountedOut]
        (verdict,) = membership.greet(now_s, "n", f"i{loss}")
        if isinstance(verdict, JoinRefused):
            refused.append(verdict.retry_after_s)
            now_s += verdict.retry_after_s
            membership.greet(now_s, "n", f"i{loss}")
        membership.reconcile(now_s, "n", f"i{loss}")
        assert state(membership) is NodeState.READY
    assert refused == [600.0, 1200.0, 2400.0]


def test_nodes_of_the_gateway_before_are_awaited_as_if_they_were_silent_since_its_start() -> None:
    membership = NodeMembership()
    assert kinds(membership.expect(10, "n")) == [Shut]
    assert kinds(membership.greet(11, "n", "i")) == [Admitted]
    assert kinds(membership.reconcile(12, "n", "i")) == [Serves]
    membership.expect(12, "m", draining=True)
    assert membership.next_s() == 72.0
    assert kinds(membership.tick(72)) == [CountedOut]


def test_there_are_no_more_nodes_than_the_bound_and_the_longest_lost_is_forgotten_for_a_new_one() -> None:
    membership = joined("a", "b", membership=NodeMembership(MembershipSettings(nodes_max=2)))
    assert kinds(membership.greet(1, "c", "c-1")) == [JoinRefused]
    membership.goodbye(2, "a", "a-1", "kill", killed=True)
    assert kinds(membership.greet(3, "c", "c-1")) == [Admitted]
    assert [member.name for member in membership.members()] == ["b", "c"]


@pytest.mark.promise("A node whose disk is full gets no actions, reports why, and serves again by itself.")
def test_a_node_that_finds_itself_unfit_is_closed_with_its_reason_and_open_again_by_its_own_word() -> None:
    membership = joined("n")
    assert membership.judge(1, "n", "n-1", "its disk is full") == [Shut("n", "unfit: its disk is full")]
    member = membership.get("n")
    assert member is not None and (member.state, member.why) == (NodeState.UNFIT, "its disk is full")
    assert membership.judge(2, "n", "n-1", "its disk is full") == [], "told again"
    assert membership.next_s() is None, "time alone does nothing to it"
    assert membership.judge(3, "n", "n-1", "") == [Serves("n")]
    assert state(membership) is NodeState.READY


def test_one_that_is_unfit_when_it_joins_never_opens_until_it_is_fit() -> None:
    membership = NodeMembership()
    membership.greet(0, "d", "i", draining=True, unfit="full")
    drains = Shut("d", "draining: its daemon drains, and unfit: full")
    assert membership.reconcile(1, "d", "i") == [Serves("d"), drains]
    membership.greet(0, "n", "i", unfit="full")
    assert membership.reconcile(1, "n", "i") == [Serves("n"), Shut("n", "unfit: full")]
    assert state(membership) is NodeState.UNFIT
    membership.lose_link(2, "n", "i", "cut")
    assert membership.judge(3, "n", "i", "") == [], "it is not heard: it says so again when it joins"
    membership.greet(4, "n", "i")
    assert membership.reconcile(5, "n", "i") == [Serves("n")]


# -- any history


class Event(NamedTuple):
    """What happens: a method of the membership, and what that is told."""

    method: str
    node: str | None = None
    instance: str | None = None
    more: Mapping[str, object] = MappingProxyType({})

    def apply(self, membership: NodeMembership, now_s: float) -> list[Verdict]:
        names = [name for name in (self.node, self.instance) if name is not None]
        verdicts: list[Verdict] = getattr(membership, self.method)(now_s, *names, **self.more)
        return verdicts


class NodeHistory:
    """Random events at random instants, and what must hold after each."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.names = [f"n{number}" for number in range(self.chance.choice((1, 3, 12)))]
        self.settings = MembershipSettings(
            storm_share=self.chance.choice((0.1, 0.5)), drain_grace_s=self.chance.choice((10.0, 600.0))
        )
        self.membership = NodeMembership(self.settings)
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
            if self.chance.random() < 0.2 and (next_s := self.membership.next_s()) is not None:
                self.now_s = max(self.now_s, next_s)
            self.tell(self.event())

    def event(self) -> Event:
        chance, name = self.chance, self.chance.choice(self.names)
        member = self.membership.get(name)
        known = "none" if member is None else member.instance
        instance = known if chance.random() < 0.8 else f"i{chance.randrange(10**6)}"
        fresh = f"i{chance.randrange(10**6)}" if chance.random() < 0.6 else instance
        draining, finishing, killed, final = (chance.random() < share for share in (0.1, 0.3, 0.5, 0.5))
        unfit = chance.choice(("", "full"))
        return chance.choice(
            (
                Event("greet", name, fresh, {"draining": draining}),
                Event("greet", name, fresh, {"unfit": chance.choice(("", unfit))}),
                Event("reconcile", name, instance),
                Event("reconcile", name, instance),
                Event("judge", name, instance, {"why": unfit, "finishing": finishing}),
                Event("lose_link", name, instance, {"why": "cut"}),
                Event("expect", name),
                Event("drain", name, None, {"why": "asked"}),
                Event("empty", name),
                Event("goodbye", name, instance, {"why": "bye", "killed": killed}),
                Event("note_ray", name, None, {"why": "dead", "final": final}),
                Event("tick"),
            )
        )

    def tell(self, event: Event) -> None:
        before = {member.name: member.state for member in self.membership.members()}
        beats = {name for name, was in before.items() if was in (NodeState.READY, NodeState.UNFIT, NodeState.DRAINING)}
        verdicts = event.apply(self.membership, self.now_s)
        for verdict in verdicts:
            self.check(verdict, event, before)
        after = {member.name: member.state for member in self.membership.members()}
        assert self.open == {name for name, now in after.items() if now is NodeState.READY}, (event, verdicts)
        if event.method == "note_ray" and before.get(str(event.node)) in (NodeState.READY, NodeState.UNFIT):
            node = str(event.node)
            assert node in beats and after[node] is before[node], "Ray ended a node that beats"
        if len(verdicts) <= 1:  # one step, one move
            for name, now in after.items():
                was = before.get(name, NodeState.LOST)
                assert now is was or now in LEGAL_NODE_MOVES[was] or event.method == "expect", (event, was, now)
        for member in self.membership.members():
            if member.state in (NodeState.UNFIT, NodeState.DRAINING):
                can = not member.unfit or member.finishing
                assert self.goes_on[member.name] is can, f"{member}: its trajectories go on as its last word says"
            due = member.state is NodeState.SUSPECT and not self.membership.storm_left_s
            assert not due or self.now_s - member.since_s < self.settings.lost_after_s, f"{member} is overdue"

    def check(self, verdict: Verdict, event: Event, before: dict[str, NodeState]) -> None:
        match verdict:
            case Admitted():
                assert event.method == "greet" and verdict.instance == event.instance
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
            case JoinRefused():
                assert verdict.retry_after_s > 0 and verdict.why

    def count_silent_loss(self, known: int) -> None:
        """More than the share within the window are lost only after the hold."""
        self.silent_losses.append(self.now_s)
        recent = [at_s for at_s in self.silent_losses if at_s > self.now_s - self.settings.storm_window_s]
        allowed = max(1, int(self.settings.storm_share * (known + len(recent))))
        if len(recent) > allowed:
            silent_s = [self.now_s - member.contact_s for member in self.membership.members()]
            held_s = self.settings.storm_hold_s
            assert max(silent_s) >= held_s, f"{len(recent)} were lost within a minute, {allowed} may be"


@pytest.mark.parametrize("slice_", range(SLICES))
def test_no_history_breaks_a_promise(slice_: int) -> None:
    for seed in range(slice_, HISTORIES, SLICES):
        try:
            NodeHistory(seed).run()
        except AssertionError as error:
            raise AssertionError(f"{error}\nin the history of seed {seed}") from error
