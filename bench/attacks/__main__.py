"""Attacks on rewards and on sandboxes, in both kinds of sandboxes: what each has reached is counted by name.

``python -m bench.attacks [--provider process|container] [--seed N] [--variants N] [--quick] [--json]``. Recorded
programs are played as well where real inputs are given (TANGRAM_DATA). A further kind is one more function of `KINDS`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.attacks.play import EVERY, FRESH, SAME, SaidLog, graded, is_earned, play, playable, small
from bench.attacks.recorded import CASES, RECORDED, failures_of
from bench.attacks.rewards import LISTED, NOTHING, PROJECT, TEST, RewardAttack
from bench.attacks.trees import play as lay_out
from bench.attacks.variants import untrue, variants
from bench.inputs import OWN_PATH, real_input
from bench.report import BenchReport, median, parser
from manager.errors import CodedError
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider

SPEC = SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20, pids=512)
PROVIDERS = ("process", "container")
#: What no attack may reach; each is counted, over both kinds of sandboxes.
COUNTS = (
    *("forged_rewards", "vetoed_rewards", "untrue_checked", "untold_rewards", "uncontained_programs"),
    *("host_writes", "host_reads", "tenant_crossings", "leftovers"),
)
VARIANTS, VARIANTS_QUICK = 200, 20
#: What the host alone knows, and one tenant alone.
HOSTS, TENANTS = "known to the host alone", "known to one tenant alone"
#: Prints what it can read of other places than its own: of other processes' roots, and of a path that is the host's.
SEARCH = """
import glob, sys
for place in [*sys.argv[1:], *glob.glob("/proc/[0-9]*/root/tmp/*"), *glob.glob("/dev/shm/*"), *glob.glob("/tmp/*")]:
    try:
        with open(place, errors="replace") as file:
            print(file.read(1000))
    except OSError:
        pass
"""


@dataclass(slots=True)
class Attacked:
    """Sandboxes of one kind, and what became of the attacks in them."""

    environments: Environments
    #: A directory of the host that no sandbox shows.
    outside: Path
    seed: int
    variants: int
    #: Which of the named attacks are played: every one, or in each kind of sandboxes every other.
    first: int = 0
    step: int = 1
    cases: int = 0
    reached: dict[str, list[str]] = field(default_factory=lambda: {count: [] for count in COUNTS})

    async def reward(
        self, attack: RewardAttack, function: FunctionSpec, name: str, *, log: SaidLog | None = None
    ) -> Mapping[str, Any] | None:
        """Play an attack; count what it has reached, and return the result if there is one."""
        if not playable(attack, self.environments.provider):
            return None
        self.cases += 1
        value, why = None, ""
        try:
            value = await play(attack, self.environments, small(SPEC), function, trajectory=name, log=log)
        except CodedError as failure:
            why = f" ({failure.message[:100]})"
        finally:
            await self.environments.end(name)
        if value is None or value["reward"] is None:
            self.reached["vetoed_rewards"].append(name + why)
        elif not is_earned(attack, value["reward"]):
            self.reached["forged_rewards"].append(name)
        elif not value["note"]:
            self.reached["untold_rewards"].append(name)
        return value


def main() -> int:
    flags = parser("attacks")
    flags.add_argument("--provider", choices=PROVIDERS, help="both by default")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--variants", type=int, default=0, help=f"of each kind of sandbox; {VARIANTS // 2} by default")
    given = flags.parse_args()
    report = BenchReport("attacks")
    count = given.variants or (VARIANTS_QUICK if given.quick else VARIANTS) // 2
    reached: dict[str, list[str]] = {count: [] for count in COUNTS}
    cases = 0
    for kind in (given.provider,) if given.provider else PROVIDERS:
        if kind == "container" and not given.provider and shutil.which("docker") is None:
            report.note("there is no Docker engine: containers were not attacked")
            continue
        with tempfile.TemporaryDirectory(prefix="tangram-attacks-") as directory:
            Path(directory).chmod(0o755)
            arena = asyncio.run(attacked(kind, Path(directory), report, given.seed, count, quick=given.quick))
        cases += arena.cases
        for name, those in arena.reached.items():
            reached[name] += [f"{kind}: {each}" for each in those]
    report.figure("attempts", cases)
    for name, those in reached.items():
        report.check(name, len(those), limit=0, better="lower")
        if those:
            report.note(f"{name}: {', '.join(those)}")
    return report.print(as_json=given.json)


async def attacked(kind: str, directory: Path, report: BenchReport, seed: int, count: int, *, quick: bool) -> Attacked:
    """Play every kind of attack in one kind of sandboxes; return what they have reached."""
    witness = directory / "witness"
    witness.write_text(HOSTS, encoding="ascii")
    path = OWN_PATH if kind == "process" else ""
    provider = make_provider(ProviderSettings(kind=kind, state_dir=directory / "state", path=path))  # type: ignore[arg-type]
    environments = Environments(provider, EnvironmentSettings(default=small(SPEC)))
    first, step = (PROVIDERS.index(kind), len(PROVIDERS)) if quick else (0, 1)
    arena = Attacked(environments, directory, seed, count, first, step)
    if not provider.info.limits["processes_hidden"]:
        report.note(f"{provider.info.engine} shares the host's processes: nothing was attacked")
        await environments.close()
        await provider.close()
        return arena
    try:
        for attacks in KINDS:
            await attacks(arena)
        ratio = await fresh_over_warm(environments, 5 if quick else 20)
        report.figure(f"fresh_grade_over_warm_p50_{kind}", round(ratio, 3))
    finally:
        await environments.close()
    arena.reached["leftovers"] += ["a sandbox"] * await provider.reap(())
    await provider.close()
    written = await asyncio.to_thread(lambda: {path.name for path in directory.iterdir()} - {"witness", "state"})
    arena.reached["host_writes"] += sorted(written) + ["witness"] * (witness.read_text(encoding="ascii") != HOSTS)
    return arena


async def rewards(arena: Attacked) -> None:
    """Each attack where the agent worked, if it is held there, and in a fresh sandbox."""
    for attack in EVERY[arena.first :: arena.step]:
        for place, function, another in (("same", SAME, attack.held), ("fresh", FRESH, attack.fresh)):
            if another:
                await arena.reward(attack, function, f"{attack.name}-{place}")


async def drawn(arena: Attacked) -> None:
    """Variants of the kinds of attack."""
    for variant in variants(arena.seed, arena.variants, SAME):
        log = SaidLog()
        value = await arena.reward(variant.attack, variant.function, variant.name, log=log)
        if value is not None:
            arena.reached["untrue_checked"] += [f"{variant.name} ({word})" for word in untrue(value, log.said)]


async def programs(arena: Attacked) -> None:
    """Programs that mean harm: those of our own, and the recorded ones."""
    found = real_input(RECORDED)
    lines = [] if found is None else found.read_text(encoding="utf-8").splitlines()
    sandbox = await arena.environments.ensure("programs", SPEC)
    failed = await failures_of([*CASES, *(json.loads(line) for line in lines)], sandbox)
    arena.cases += len(failed)
    arena.reached["uncontained_programs"] += [name for name, why in failed.items() if why]
    await arena.environments.end("programs")


async def neighbours(arena: Attacked) -> None:
    """One sandbox looks for what another and the host have."""
    hide = f"for d in /tmp /dev/shm .; do echo '{TENANTS}' > $d/secret; done; setsid sleep 300 >/dev/null 2>&1 &"
    for user in ("", "root"):
        spec = replace(SPEC, users=("root",), user=user) if user else SPEC
        if not playable(RewardAttack(name="", user=user), arena.environments.provider):
            continue
        arena.cases += 1
        owner, other = [await arena.environments.ensure(f"{name}{user}", spec) for name in ("owner", "other")]
        await owner.run(Command(shell=hide))
        seen = await other.run(Command(argv=("python3", "-c", SEARCH, str(arena.outside / "witness"))))
        await other.run(Command(shell="kill -9 -1"))
        left = await owner.run(Command(shell="cat /tmp/secret"))
        if TENANTS.encode() in seen.stdout or TENANTS.encode() not in left.stdout:
            arena.reached["tenant_crossings"].append(f"user {user or 'its own'}")
        if HOSTS.encode() in seen.stdout:
            arena.reached["host_reads"].append(f"user {user or 'its own'}")
        for name in ("owner", "other"):
            await arena.environments.end(f"{name}{user}")


async def trees(arena: Attacked) -> None:
    """Tars that mean harm, where the gateway lays one out on its machine."""
    with tempfile.TemporaryDirectory() as place:
        harm = await asyncio.to_thread(lay_out, Path(place), arena.variants, arena.seed)
    arena.cases += len(harm)
    for name, done in harm.items():
        for each in done:
            kind = "host_reads" if "leaves a link out" in each else "host_writes"
            arena.reached[kind].append(f"{name} {each}")


#: In turn, each on its own.
KINDS = (rewards, drawn, programs, neighbours, trees)


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
