"""The doors in other protocols, driven by the real clients: verl's scorer with 64 at once, teachers in four
dialects, and the door that speaks Docker's API beside the real engine.

Each client is installed from the package registry into an environment of its own (bench.facades.client_environments).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.facades.client_environments import client_environment
from bench.facades.docker_socket import docker_engine
from bench.facades.serving import SERVER, served
from bench.facades.teachers import teachers
from bench.inputs import PROGRAMS as RECORDED
from bench.inputs import programs, told
from bench.report import BenchReport, parser, play
from bench.serving import TOKEN

AT_ONCE, TIMEOUT_S = 64, 10
PROGRAMS, QUICK_PROGRAMS = 480, 64
DONE = "\nprint('tangram-done')\n"
SCORER = (
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


async def verdicts(report: BenchReport, root: Path, count: int) -> None:
    """verl's scorer, as it is on the registry, with many programs at once."""
    asked = asked_programs(count)
    file = root / "programs.json"
    file.write_text(json.dumps([each | {"stdin": "", "expected": "tangram-done\n"} for each in asked]))
    async with served(root / "scorer", SCORER) as doors:
        url = f"{doors.address}/sandboxfusion/~{TOKEN}/run_code"
        client = client_environment("sandboxfusion")
        answer = await client.run("verl_scorer", url, str(file), str(AT_ONCE), str(TIMEOUT_S))
    pairs = list(zip(asked, answer["scores"], strict=True))
    wrong = sum(bool(each["right"]) != (score["score"] == 1.0) for each, score in pairs)
    silent = sum(score["score"] == 0.0 and score["error"] is not None for _, score in pairs)
    report.note(told(RECORDED))
    report.figure("programs", len(asked))
    report.figure("programs_per_s", round(len(asked) / answer["seconds"], 2))
    report.check("wrong_verdicts", wrong, limit=0, better="lower")
    report.check("silent_zero_rewards", silent, limit=0, better="lower")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status says whether every check holds."""
    options = parser("facades", parts=True).parse_args(argv)
    report = BenchReport("facades")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)  # the sandbox's user reads handlers below it
        return play(
            report,
            options,
            {
                "verdicts": lambda: verdicts(report, root, QUICK_PROGRAMS if options.quick else PROGRAMS),
                "teachers": lambda: teachers(report, root / "models"),
                "docker": lambda: docker_engine(report, root / "docker"),
            },
        )


if __name__ == "__main__":
    sys.exit(main())
