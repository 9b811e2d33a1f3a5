"""The doors in other protocols, driven by the real clients: verl's scorer with 64 at once, teachers in
four dialects, the door that speaks Docker's API beside the real engine, and what each door adds.

Each client is installed from the package registry into an environment of its own (bench.facades.client_environments).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from bench.facades.client_environments import client_environment
from bench.facades.docker_socket import docker_engine
from bench.facades.overheads import overheads
from bench.facades.serving import SERVER, TOKEN, ServedDoors, served
from bench.facades.teachers import teachers
from bench.gateway import process
from bench.inputs import PROGRAMS as RECORDED
from bench.inputs import programs, told
from bench.report import BenchReport, arguments

AT_ONCE, TIMEOUT_S = 64, 10
PROGRAMS, QUICK_PROGRAMS = 480, 64
ROUNDS, QUICK_ROUNDS = 10, 2
RUNNER = "from bench.facades.plain_runner import main; main()"
DONE = "\nprint('tangram-done')\n"
CONFIG = (
    SERVER
    + """\
  facades: {{sandboxfusion: {{languages: {{python: run_program}}}}}}
sandbox: {{provider: process}}
functions:
  run_program:
    {{runtime: exec, sandbox: {{memory: 512Mi, warm: {{min: 4, max: 16}}}}, timeout: 30s, output_limit: 16Mi,
     max_queued: 16, idempotent: true}}
"""
)


def asked_programs(count: int) -> list[dict[str, object]]:
    """Programs and whether they are right: the recorded ones if they are given, none that takes all its time."""
    kept = [each for each in programs() if each["verdict"] in ("pass", "fail")][:count]
    return [{"program": each["program"] + DONE, "right": each["verdict"] == "pass"} for each in kept]


async def verdicts(report: BenchReport, doors: ServedDoors, directory: Path, count: int) -> None:
    """verl's scorer, as it is on the registry: at the door, and at a server that only runs the programs."""
    asked = asked_programs(count)
    file = directory / "programs.json"
    file.write_text(json.dumps([each | {"stdin": "", "expected": "tangram-done\n"} for each in asked]))

    async def scored(url: str) -> tuple[float, int, int]:
        client = client_environment("sandboxfusion")
        answer = await client.run("verl_scorer", url, str(file), str(AT_ONCE), str(TIMEOUT_S))
        pairs = list(zip(asked, answer["scores"], strict=True))
        wrong = sum(bool(each["right"]) != (score["score"] == 1.0) for each, score in pairs)
        silent = sum(score["score"] == 0.0 and score["error"] is not None for _, score in pairs)
        return len(asked) / answer["seconds"], wrong, silent

    rate, wrong, silent = await scored(f"{doors.address}/sandboxfusion/~{TOKEN}/run_code")
    report.note(told(RECORDED))
    report.figure("programs", len(asked))
    report.figure("programs_per_s", round(rate, 2))
    async with process(RUNNER) as runner:
        plain_rate, plain_wrong, _ = await scored(f"http://127.0.0.1:{runner['http']}/run_code")
    report.figure("plain_runner_programs_per_s", round(plain_rate, 2))
    report.figure("plain_runner_wrong_verdicts", plain_wrong)
    report.figure("door_over_plain_runner_rate", round(rate / plain_rate, 2))
    report.check("wrong_verdicts", wrong, limit=0, better="lower")
    report.check("silent_zero_rewards", silent, limit=0, better="lower")


async def measure(report: BenchReport, root: Path, *, quick: bool) -> None:
    """Serve the doors, and let the clients in."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    async with served(root / "scorer", CONFIG) as doors:
        await verdicts(report, doors, root, QUICK_PROGRAMS if quick else PROGRAMS)
    rows = await overheads(root / "doors", rounds)
    rows |= await teachers(report, root / "models", rounds)
    rows |= await docker_engine(report, root / "docker")
    report.figure("door_overhead", rows)


def main() -> int:
    """Run the bench; the exit status says whether every check holds."""
    options = arguments("facades")
    report = BenchReport("facades")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)  # the sandbox's user reads handlers below it
        asyncio.run(measure(report, root, quick=options.quick))
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
