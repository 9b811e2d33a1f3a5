"""What the stream told is kept as the page keeps it: merged, bounded, and whole again after a gap or a restart."""

from __future__ import annotations

import copy

from tangram.cli.top import watched as module
from tangram.cli.top.watched import EventReader, StreamEvent, Watched
from tests.tangram.cli.top.told import NOW_MS, hello, running, state, watched


def test_lines_become_events_and_heartbeats_none() -> None:
    reader = EventReader()
    lines = ["id: aaaa0000.3", "event: tick", 'data: {"now": 5}', "", "", "event: gap", 'data: {"ticks": 9}', ""]
    found = [event for line in lines if (event := reader.feed(line)) is not None]
    assert found == [StreamEvent("aaaa0000.3", "tick", {"now": 5}), StreamEvent(None, "gap", {"ticks": 9})]


def test_a_tick_changes_what_it_names_and_nothing_else() -> None:
    found = watched()
    before = copy.deepcopy(found.sections)
    change = {"run": 5, "tasks": {"idle": None, "new": [1, 0, {}, 1.0]}, "verdict": ["idle", "nothing"]}
    found.take(StreamEvent("aaaa0000.8", "tick", {"now": NOW_MS + 500, "d": change}))
    assert found.sections["run"] == 5
    assert found.section("tasks").keys() == {"swe", "new"}
    assert found.section("pools") == before["pools"]
    assert (found.last, found.now_ms) == ("aaaa0000.8", NOW_MS + 500)


def test_running_and_failed_actions_are_told_apart() -> None:
    found = watched()
    assert [bar.id for bar in found.running()] == [running(1), running(2)]
    (failed,) = found.failed()
    assert (failed.id, failed.reason, failed.function) == (running(3), "timeout", "pytest_reward")
    found.take(StreamEvent("aaaa0000.8", "tick", {"now": NOW_MS, "bars": {"s": [], "e": [[1, 5, 9000, "cancelled"]]}}))
    assert [bar.id for bar in found.running()] == [running(2)]
    assert len(list(found.failed())) == 1, "what was cancelled did not fail"


def test_after_a_gap_nothing_is_left_of_what_was_missed() -> None:
    found = watched()
    told = dict(state().told)
    told["bars"] = {"s": [], "e": [], "names": [0, ["other"]]}
    found.take(StreamEvent(None, "gap", {"ticks": 99}))
    found.take(StreamEvent("aaaa0000.99", "state", told))
    assert not list(found.running())


def test_another_gateway_is_followed_from_its_beginning() -> None:
    found = watched()
    found.take(hello("bbbb0000"))
    assert found.last is None and found.restarts == 1
    assert Watched().last is None


def test_bars_and_curves_are_bounded() -> None:
    found = watched()
    most = module.BARS_MAX
    starts: list[object] = [[number, running(number), 1, 4, None, NOW_MS, 0, []] for number in range(10, 10 + 2 * most)]
    found.take(StreamEvent("aaaa0000.8", "tick", {"now": NOW_MS, "bars": {"s": starts, "e": []}}))
    assert len(found.bars) == most
    for number in range(3 * module.CURVE_MAX):
        found.take(StreamEvent(f"aaaa0000.{number}", "tick", {"now": NOW_MS}))
    assert len(found.curves["run"]) == module.CURVE_MAX
