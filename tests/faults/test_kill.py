"""kill -9 of the gateway under load, again and again: nothing accepted is lost, nothing runs twice by mistake."""

from __future__ import annotations

from tests.e2e.gateway import GatewayProcess
from tests.faults.world import Deeds, Submitter, at_rest, balanced, record, series, until

ROUNDS = 3
#: Calls accepted between two kills, by all submitters.
HARVEST = 60


def test_killed_again_and_again_it_loses_nothing_and_runs_nothing_twice(gateway: GatewayProcess, deeds: Deeds) -> None:
    submitters = [Submitter(lambda: gateway.url, function) for function in ("once", "once", "again", "again")]
    for submitter in submitters:
        submitter.start()

    def accepted() -> int:
        return sum(len(submitter.accepted) for submitter in submitters)

    for _ in range(ROUNDS):
        goal = accepted() + HARVEST
        until(lambda goal=goal: accepted() >= goal, "calls are accepted")  # type: ignore[misc]
        assert balanced(series(gateway))
        gateway.kill()
        gateway.start()
        assert balanced(series(gateway))
    for submitter in submitters:
        submitter.finish()
        assert submitter.complaints == []
    names = {name: each for submitter in submitters for name, each in submitter.accepted.items()}
    assert len(set(names.values())) == len(names) >= ROUNDS * HARVEST
    ends = {name: record(gateway, invocation_id) for name, invocation_id in names.items()}
    for name, end in ends.items():
        if name.startswith("again"):
            assert end["state"] == "succeeded", end
            # Its start is not on disk before it begins, so the record may not count a run that a kill cut short.
            assert 1 <= deeds.done[name] <= 1 + ROUNDS
        else:
            assert end["state"] in ("succeeded", "lost"), end
            assert end["reason"] in (None, "gateway_restart")
            assert deeds.done[name] <= 1, "it ran twice"
        assert deeds.done[name] >= (end["state"] == "succeeded"), "it ended without being done"
    assert any(end["attempt"] > 1 or end["state"] == "lost" for end in ends.values()), "nothing ran when it was killed"
    until(lambda: at_rest(gateway), "the gateway is at rest")
