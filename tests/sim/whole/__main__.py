"""Histories from the command line: ``python -m tests.sim.whole --seed 7``; what a seed stands for, what came of it.

``--seeds 20000`` follows so many, ``--known`` puts each known fault back and says in which seed it is found.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from bench.runner import KNOWN_FAULTS, known_fault
from tests.sim.whole.history import Plan, SimHistory, at_rest, plan_of
from tests.sim.whole.judge import verdict
from tests.sim.whole.known_faults import FAULTS, put_back
from tests.sim.whole.loop import SimLoop

#: Seeds within which each known fault must be found.
WITHIN = 2000
#: Histories that one process follows. What killed processes leave is in circles, and takes as long to collect as a
#: history to follow: it ends with the process.
PIECE = 25
#: Collections in which everything ends, for what ends leaves something itself.
BURIALS = 5
#: What hangs on a seed must not hang on the process.
HASH_SEED = "0"


@contextmanager
def quietly() -> Iterator[None]:
    """Bury in silence, and at the end, what killed processes leave: it ends when it is collected."""
    collecting, hook = gc.isenabled(), sys.unraisablehook
    sys.unraisablehook = lambda left: None
    grave = SimLoop(random.Random(0))  # type: ignore[abstract]
    asyncio._set_running_loop(grave)  # what ends then may look for one
    gc.freeze()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            for _ in range(BURIALS):
                gc.collect()
    finally:
        asyncio._set_running_loop(None)
        gc.unfreeze()
        sys.unraisablehook = hook
        if collecting:
            gc.enable()


def judged(seed: int, plan: Plan | None = None) -> str:
    """Return the promise that a history breaks; empty if none."""
    return verdict(seed, SimHistory(seed, plan))


def judged_all(seeds: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield each seed and what its history breaks, in order; processes of their own follow them."""
    for setting in {plan_of(seed).setting for seed in seeds[: 2 * PIECE]}:
        at_rest(setting.nodes, setting.local)  # once for all processes
    for first in range(0, len(seeds), PIECE):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with os.fdopen(writing, "w") as told:
                    for seed in seeds[first : first + PIECE]:
                        told.write(json.dumps([seed, judged(seed)]) + "\n")
                        told.flush()
                status = 0
            except BrokenPipeError:  # nobody asks for more
                pass
            except Exception:  # noqa: BLE001  # the parent says so
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        try:
            with os.fdopen(reading) as lines:
                for line in lines:
                    seed, told_of_it = json.loads(line)
                    yield seed, told_of_it
        finally:
            _, status = os.waitpid(child, 0)
        assert status == 0, f"the process of seeds {seeds[first]} and on ended with {status}"


def shortest(seed: int, plan: Plan) -> Plan:
    """Leave out operations without which the history still breaks a promise, one after the other."""
    operations = list(plan.operations)
    for operation in reversed(plan.operations):
        fewer = [each for each in operations if each is not operation]
        if judged(seed, Plan(plan.setting, tuple(fewer))):
            operations = fewer
    return Plan(plan.setting, tuple(operations))


def story(seed: int) -> str:
    """Return the shortest history of a failing seed, as text; of one that holds, all of it."""
    history = SimHistory(seed)
    if verdict(seed, history):
        history = SimHistory(seed, shortest(seed, history.plan))
        verdict(seed, history)
    plan = history.plan
    broken = verdict(seed, SimHistory(seed, plan)) or "no promise is broken"
    runs = [f"{run}" for run in history.world.ledger.runs]
    again = f"PYTHONHASHSEED={HASH_SEED} python -m tests.sim.whole --seed {seed}"
    return "\n".join([f"{plan.setting}", *history.lines, *runs, f"seed {seed}: {broken}", f"again with: {again}"])


def first_found(seeds: Sequence[int], says: tuple[str, ...] = ()) -> int | None:
    """Return the first seed whose history breaks a promise, in one of these ways if any are named."""
    for seed, told in judged_all(seeds):
        if told and (not says or any(each in told for each in says)):
            return seed
    return None


def known(within: int) -> int:
    """Print which known faults of the world are found; return how many."""
    found = 0
    for name, (_, says) in FAULTS.items():
        with put_back(name):
            seed = first_found(range(within), says)
        clean = seed is not None and not judged(seed)
        found += clean
        print(
            f"{name}: {'not found' if seed is None else f'seed {seed}'}{'' if clean else ', NOT ITS OWN'}", flush=True
        )
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, help="one history, told")
    options.add_argument("--seeds", type=int, default=1000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--known", action="store_true")
    options.add_argument("--fault", default="", help="with this known fault put back")
    given = options.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim.whole", *sys.argv[1:]])
    with quietly(), put_back(given.fault) if given.fault else nullcontext():
        if given.known:
            found = known(WITHIN)
        else:
            return follow(given.seed, range(given.first, given.first + given.seeds))
    for name in KNOWN_FAULTS:  # the runner's own: under its fuzzer, with real processes
        seed = known_fault(name)
        found += seed is not None
        print(f"{name}: {'not found' if seed is None else f'seed {seed}'}", flush=True)
    print(f"known_faults_found {found} of {len(FAULTS) + len(KNOWN_FAULTS)}")
    return found < len(FAULTS) + len(KNOWN_FAULTS)


def follow(seed: int | None, seeds: Sequence[int]) -> int:
    """Tell one history, or which of many break a promise; return the exit status."""
    if seed is not None:
        print(story(seed))
        return 0
    failed, began_s = [], sum(os.times()[:4])
    for each, told in judged_all(seeds):
        if told:
            failed.append(each)
            print(f"seed {each}: {told}"[:500], flush=True)
    seconds = sum(os.times()[:4]) - began_s
    print(f"{len(seeds)} histories, {len(seeds) / seconds:.0f} a second of one core; {len(failed)} fail: {failed[:20]}")
    return len(failed) > 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
