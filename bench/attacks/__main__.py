"""Attacks on rewards and on sandboxes, in both kinds of sandboxes: what each has reached is counted by name.

``python -m bench.attacks [--provider process|container] [--seed N] [--variants N] [--quick] [--json]``. Recorded
programs are played as well where real inputs are given (TANGRAM_DATA). A whole run takes ten minutes at most: what does
not begin by then is left out, and counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.attacks.play import EVERY, FRESH, SAME, SPEC, SaidLog, done, is_earned, playable, small, solved
from bench.attacks.recorded import CASES, RECORDED, failures_of
from bench.attacks.rewards import RewardAttack
from bench.attacks.tenants import crossings
from bench.attacks.trees import play as lay_out
from bench.attacks.variants import untrue, variants
from bench.inputs import OWN_PATH, real_input
from bench.report import BenchReport, median, parser
from manager.errors import CodedError
from manager.function import FunctionSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider

PROVIDERS = ("process", "container")
#: What no attack may reach; each is counted, over both kinds of sandboxes.
COUNTS = (
    *("forged_rewards", "vetoed_rewards", "untrue_checked", "untold_rewards", "uncontained_programs"),
    *("host_writes", "host_reads", "tenant_crossings", "leftovers"),
)
VARIANTS, VARIANTS_QUICK = 200, 20
#: Attacks that are played at once, and after how many of them it is said how far it is.
LANES, TOLD_EACH = 4, 25
#: Seconds after which no further attack begins.
LIMIT_S = 540.0
#: Rewards that a whole run tries to forge, at the least.
REWARDS_MIN = 400
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
    #: What the host alone has, in a directory that no sandbox shows.
    witness: Path
    tally: Tally

    @property
    def kind(self) -> str:
        return self.environments.provider.info.kind

    async def rewards(self, attack: RewardAttack, functions: Mapping[str, FunctionSpec], lane: int) -> None:
        """Let an agent do its worst once, and grade it by each function; count what it has reached."""
        if not playable(attack, self.environments.provider):
            return
        try:
            async with done(attack, self.environments, small(SPEC), trajectory=attack.name) as worst:
                for name, function in functions.items():
                    log = SaidLog()
                    await self._count(
                        f"{self.kind}: {attack.name}{name}", attack, worst.graded(function, log, lane), log
                    )
        finally:
            await self.environments.end(attack.name)

    async def _count(
        self, name: str, attack: RewardAttack, grading: Awaitable[Mapping[str, object]], log: SaidLog
    ) -> None:
        value, why = None, ""
        try:
            value = await grading
        except CodedError as failure:
            why = f" ({failure.message[:100]})"
        self.tally.attempts["rewards"] += 1
        if value is None or value["reward"] is None:
            self.tally.reach("vetoed_rewards", name + why)
            return
        if not is_earned(attack, value["reward"]):
            self.tally.reach("forged_rewards", name)
        elif not value["note"]:
            self.tally.reach("untold_rewards", name)
        for word in untrue(value, log.said):
            self.tally.reach("untrue_checked", f"{name} ({word})")


@dataclass(slots=True)
class Tally:
    """What attacks have reached, over all kinds of sandboxes."""

    attempts: Counter[str] = field(default_factory=Counter)
    reached: dict[str, list[str]] = field(default_factory=lambda: {count: [] for count in COUNTS})

    def reach(self, count: str, name: str) -> None:
        self.reached[count].append(name)

    def tell(self, report: BenchReport) -> None:
        """Write what is known into the report."""
        report.figures |= {f"attempts_{kind}": number for kind, number in self.attempts.items()}
        report.figure("attempts", self.attempts.total())
        report.checks[:] = [check for check in report.checks if check.name not in self.reached]
        report.notes[:] = [note for note in report.notes if note.partition(":")[0] not in self.reached]
        for name, those in self.reached.items():
            report.check(name, len(those), limit=0, better="lower")
            if those:
                report.note(f"{name}: {', '.join(those)}")


#: One attack, played on a lane, from whose core on it is leased cores.
Job = Callable[[int], Awaitable[None]]


def main() -> int:
    flags = parser("attacks")
    flags.add_argument("--provider", choices=PROVIDERS, help="both by default")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--variants", type=int, default=0, help=f"of each kind of sandbox; {VARIANTS // 2} by default")
    given = flags.parse_args()
    report, tally = BenchReport("attacks"), Tally()
    report.ends_s = time.monotonic() + LIMIT_S
    kinds = [given.provider] if given.provider else list(PROVIDERS)
    if not given.provider and shutil.which("docker") is None:
        kinds.remove("container")
        report.note("there is no Docker engine: containers were not attacked")
    count = given.variants or (VARIANTS_QUICK if given.quick else VARIANTS) // 2

    def work() -> None:
        try:
            asyncio.run(attacked(kinds, report, tally, given.seed, count, quick=given.quick))
        finally:
            tally.tell(report)

    return report.run(work, as_json=given.json)


async def attacked(
    kinds: Sequence[str], report: BenchReport, tally: Tally, seed: int, count: int, *, quick: bool
) -> None:
    """Play every kind of attack in each kind of sandboxes, a few at a time."""
    await asyncio.to_thread(trees, tally, seed, count)
    for name, crossed in (await crossings()).items():
        tally.attempts["tenants"] += 1
        if crossed:
            tally.reach("tenant_crossings", name)
    async with AsyncExitStack() as stack:
        arenas = [await stack.enter_async_context(arena(kind, report, tally)) for kind in kinds]
        arenas = [each for each in arenas if each.environments.provider.info.limits["processes_hidden"]]
        jobs = [job for number, each in enumerate(arenas) for job in jobs_of(each, seed, count, quick, number)]
        random.Random(seed).shuffle(jobs)  # where it is cut, some of each kind are known
        left = await in_lanes(jobs, report, tally)
        if left:
            report.note(f"{left} of {len(jobs)} were left out, as the time was up")
        if len(kinds) == len(PROVIDERS) and not quick:
            report.check("attempts_on_rewards", tally.attempts["rewards"], limit=REWARDS_MIN, better="higher")
        for each in arenas:
            timed = await solved(each.environments)
            ratios = [await timed(FRESH) / await timed(SAME) for _ in range(5 if quick or left else 20)]
            report.figure(f"fresh_grade_over_warm_p50_{each.kind}", round(median(ratios), 3))


@asynccontextmanager
async def arena(kind: str, report: BenchReport, tally: Tally) -> AsyncIterator[Attacked]:
    """Make sandboxes of one kind; at the end, count what is left of them, and what was written beside them."""
    with tempfile.TemporaryDirectory(prefix="tangram-attacks-") as place:
        directory = Path(place)
        await asyncio.to_thread(directory.chmod, 0o755)
        witness = directory / "witness"
        witness.write_text(HOSTS, encoding="ascii")
        path = OWN_PATH if kind == "process" else ""
        provider = make_provider(ProviderSettings(kind=kind, state_dir=directory / "state", path=path))  # type: ignore[arg-type]
        environments = Environments(provider, EnvironmentSettings(default=small(SPEC)))
        if not provider.info.limits["processes_hidden"]:
            report.note(f"{provider.info.engine} shares the host's processes: nothing was attacked")
        try:
            yield Attacked(environments, witness, tally)
        finally:
            await environments.close()
            for _ in range(await provider.reap(())):
                tally.reach("leftovers", f"{kind}: a sandbox")
            await provider.close()
            changed = ["witness"] * (witness.read_text(encoding="ascii") != HOSTS)
            written = await asyncio.to_thread(lambda: {path.name for path in directory.iterdir()})
            for name in (*sorted(written - {"witness", "state"}), *changed):
                tally.reach("host_writes", f"{kind}: {name}")


def jobs_of(arena: Attacked, seed: int, count: int, quick: bool, number: int) -> Iterator[Job]:
    """Yield the attacks in one kind of sandboxes; a quick run plays each named one in one kind alone."""
    for attack in EVERY[number % 2 :: 2] if quick else EVERY:
        functions = {"-fresh": FRESH} if attack.fresh else {}
        if attack.held:
            functions["-same"] = SAME  # last: a fresh grade leaves the trajectory as it was
        yield partial(arena.rewards, attack, functions)
    for variant in variants(seed + number, count, SAME):
        yield partial(arena.rewards, variant.attack, {"": variant.function})
    for attempt in (programs, neighbours):
        yield partial(attempt, arena)


async def in_lanes(jobs: Iterable[Job], report: BenchReport, tally: Tally) -> int:
    """Play them a few at a time until the time is up; return how many were left out."""
    waiting = deque(jobs)
    all_of_them = len(waiting)

    async def lane(number: int) -> None:
        while waiting and time.monotonic() < report.ends_s:
            await waiting.popleft()(number)
            if not (all_of_them - len(waiting)) % TOLD_EACH:
                found = sum(map(len, tally.reached.values()))
                report.progress(f"{all_of_them - len(waiting)} of {all_of_them} played, {found} reached something")
                tally.tell(report)
                report.keep()

    await asyncio.gather(*map(lane, range(LANES)))
    return len(waiting)


async def programs(arena: Attacked, _: int) -> None:
    """Programs that mean harm: those of our own, and the recorded ones."""
    found = real_input(RECORDED)
    lines = [] if found is None else found.read_text(encoding="utf-8").splitlines()
    sandbox = await arena.environments.ensure("programs", SPEC)
    failed = await failures_of([*CASES, *(json.loads(line) for line in lines)], sandbox)
    arena.tally.attempts["programs"] += len(failed)
    for name in [name for name, why in failed.items() if why]:
        arena.tally.reach("uncontained_programs", f"{arena.kind}: {name}")
    await arena.environments.end("programs")


async def neighbours(arena: Attacked, _: int) -> None:
    """One sandbox looks for what another and the host have."""
    hide = f"for d in /tmp /dev/shm .; do echo '{TENANTS}' > $d/secret; done; setsid sleep 300 >/dev/null 2>&1 &"
    for user in ("", "root"):
        spec = replace(SPEC, users=("root",), user=user) if user else SPEC
        if not playable(RewardAttack(name="", user=user), arena.environments.provider):
            continue
        who = f"{arena.kind}: user {user or 'its own'}"
        arena.tally.attempts["neighbours"] += 1
        owner, other = [await arena.environments.ensure(f"{name}{user}", spec) for name in ("owner", "other")]
        await owner.run(Command(shell=hide))
        seen = await other.run(Command(argv=("python3", "-c", SEARCH, str(arena.witness))))
        await other.run(Command(shell="kill -9 -1"))
        left = await owner.run(Command(shell="cat /tmp/secret"))
        if TENANTS.encode() in seen.stdout or TENANTS.encode() not in left.stdout:
            arena.tally.reach("tenant_crossings", who)
        if HOSTS.encode() in seen.stdout:
            arena.tally.reach("host_reads", who)
        for name in ("owner", "other"):
            await arena.environments.end(f"{name}{user}")


def trees(tally: Tally, seed: int, count: int) -> None:
    """Tars that mean harm, where the gateway lays one out on its machine."""
    with tempfile.TemporaryDirectory() as place:
        harm = lay_out(Path(place), count, seed)
    tally.attempts["trees"] += len(harm)
    for name, done_there in harm.items():
        for each in done_there:
            tally.reach("host_reads" if "leaves a link out" in each else "host_writes", f"{name} {each}")


if __name__ == "__main__":
    sys.exit(main())
