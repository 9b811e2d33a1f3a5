"""Attacks on rewards and on sandboxes: how many are held, and what a fresh grade costs.

``python -m bench.attacks [--quick] [--provider process|container] [--json]``. Recorded programs are played as
well where real inputs are given (TANGRAM_DATA).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.attacks.play import EVERY, FRESH, SAME, graded, is_earned, play, playable, small
from bench.attacks.recorded import CASES, RECORDED, failures_of
from bench.attacks.rewards import LISTED, NOTHING, PROJECT, TEST
from bench.attacks.trees import play as lay_out
from bench.inputs import OWN_PATH, real_input
from bench.report import BenchReport, median, parser
from manager.errors import CodedError
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider

SPEC = SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20, pids=512)


@dataclass(slots=True)
class Tally:
    """What became of the cases."""

    cases: int = 0
    contained: int = 0
    forged: list[str] = field(default_factory=list)
    vetoed: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    harm: list[str] = field(default_factory=list)


def main() -> int:
    flags = parser("attacks")
    flags.add_argument("--provider", choices=("process", "container"), default="process")
    given = flags.parse_args()
    report = BenchReport("attacks")
    with tempfile.TemporaryDirectory(prefix="tangram-attacks-") as directory:
        Path(directory).chmod(0o755)
        asyncio.run(measure(given.provider, Path(directory), report, quick=given.quick))
    return report.print(as_json=given.json)


async def measure(kind: str, directory: Path, report: BenchReport, *, quick: bool) -> None:
    witness = directory / "witness"
    witness.write_text("of the host", encoding="ascii")
    path = OWN_PATH if kind == "process" else ""
    settings = ProviderSettings(kind=kind, state_dir=directory / "state", path=path)  # type: ignore[arg-type]
    provider = make_provider(settings)
    if not provider.info.limits["processes_hidden"]:
        report.note(f"{provider.info.engine} shares the host's processes: nothing was attacked")
        await provider.close()
        return
    environments = Environments(provider, EnvironmentSettings(default=small(SPEC)))
    tally = Tally()
    try:
        await rewards(environments, tally)
        await programs(environments, tally)
        report.figure("fresh_grade_over_warm_p50", round(await fresh_over_warm(environments, 5 if quick else 20), 3))
    finally:
        await environments.close()
    with tempfile.TemporaryDirectory() as place:
        harm = await asyncio.to_thread(lay_out, Path(place), 60 if quick else 200, time.time_ns() % 10**9)
    tally.cases += len(harm)
    tally.contained += sum(not done for done in harm.values())
    tally.harm = [f"{name} {each}" for name, done in harm.items() for each in done]
    leftovers = await provider.reap(())
    await provider.close()
    written = await asyncio.to_thread(lambda: {path.name for path in directory.iterdir()} - {"witness", "state"})
    report.figure("provider", provider.info.engine)
    report.figure("cases", tally.cases)
    report.figure("contained", tally.contained)
    report.check("not_contained", tally.cases - tally.contained, limit=0, better="lower")
    report.check("forged_rewards", len(tally.forged), limit=0, better="lower")
    report.check("vetoed_rewards", len(tally.vetoed), limit=0, better="lower")
    report.check("rewards_without_a_note", len(tally.untold), limit=0, better="lower")
    host_writes = len(written) + (witness.read_text(encoding="ascii") != "of the host")
    host_reads = [each for each in tally.harm if "leaves a link out" in each]
    host_writes += len(tally.harm) - len(host_reads)
    report.check("host_writes", host_writes, limit=0, better="lower")
    report.check("host_reads", len(host_reads), limit=0, better="lower")
    report.check("leftovers", leftovers, limit=0, better="lower")
    for name, those in (
        ("forged", tally.forged),
        ("vetoed", tally.vetoed),
        ("untold", tally.untold),
        ("harm", tally.harm),
    ):
        if those:
            report.note(f"{name}: {', '.join(those)}")


async def rewards(environments: Environments, tally: Tally) -> None:
    """Each attack where the agent worked, if it is held there, and in a fresh sandbox."""
    for attack in EVERY:
        for place, function in (("same", SAME), ("fresh", FRESH)):
            another = attack.held if function is SAME else attack.fresh
            if not another or not playable(attack, environments.provider):
                continue
            name = f"{attack.name}-{place}"
            tally.cases += 1
            try:
                value = await play(attack, environments, small(SPEC), function, trajectory=name)
            except CodedError as failure:
                tally.vetoed.append(f"{name} ({failure.message})")
                continue
            finally:
                await environments.end(name)
                await environments.end(f"{name}-fork")
            if value["reward"] is None:
                tally.vetoed.append(name)
            elif not is_earned(attack, value["reward"]):
                tally.forged.append(name)
            elif not value["note"]:
                tally.untold.append(name)
            else:
                tally.contained += 1


async def programs(environments: Environments, tally: Tally) -> None:
    """Programs that mean harm: those of our own, and the recorded ones."""
    found = real_input(RECORDED)
    lines = [] if found is None else found.read_text(encoding="utf-8").splitlines()
    sandbox = await environments.ensure("programs", SPEC)
    failed = await failures_of([*CASES, *(json.loads(line) for line in lines)], sandbox)
    tally.cases += len(failed)
    tally.contained += sum(not why for why in failed.values())
    await environments.end("programs")


async def fresh_over_warm(environments: Environments, rounds: int) -> float:
    """Return the median ratio of a fresh grade's time to that of one where the agent worked, taken in turn."""
    solved = await play(NOTHING[1], environments, small(SPEC), SAME, trajectory="timed", solved=True)
    assert solved["reward"] == 1.0
    given = {"fail_to_pass": [LISTED], "tests": {TEST: PROJECT[TEST]}}

    async def timed(function: FunctionSpec) -> float:
        began_s = time.perf_counter()
        value = await graded(environments, function, "timed", given)
        assert value["reward"] == 1.0, value
        return time.perf_counter() - began_s

    return median([await timed(FRESH) / await timed(SAME) for _ in range(rounds)])


if __name__ == "__main__":
    sys.exit(main())
