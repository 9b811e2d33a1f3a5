"""Two sizes of one thing: the scheduling pass over a long queue, and the store's hot path over old records."""

from __future__ import annotations

import gc
import os
import sqlite3
import tempfile
import time
from pathlib import Path

from bench.report import median
from gateway.invocations.record import Mode, Record, new_id
from gateway.store.store import Store, StoreSpec
from manager.action import Action, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, TaskSpec
from manager.core.core import Core
from manager.errors import Reason
from manager.events import Execute, Finished, Submitted
from manager.outcome import Outcome, State

CORES = 16
PASSES = 50
#: Invocations of which each goes through acceptance, start and end; and how many go at once.
HOT_ROUNDS, TOGETHER = 60, 16
DONE = Outcome(state=State.SUCCEEDED, execution_s=0.01)
OLD = """
INSERT INTO invocations (
    seq, id, function, revision, task, trajectory, parent, mode, detached, accepted_s, options, state, reason, message,
    component, detail, retry_after_s, attempt, attempts, started_s, ended_s, queue_s, overhead_s, execution_s, node,
    units, usage, dead, callback, result
)
WITH RECURSIVE old(seq) AS (SELECT ? UNION ALL SELECT seq + 1 FROM old WHERE seq < ?)
SELECT seq, printf('%011x-%012x', seq, seq), 'f' || (seq % 20), 'r', 'default', 't' || (seq / 20), NULL, 'async', 1,
    seq * 0.01, '{}', 'succeeded', NULL, '', '', '{}', NULL, 1, '[]', seq * 0.01, seq * 0.01, 0.01, 0.001, 0.1,
    'local', '{"cpu":1}', '{}', 0, NULL, x'7b7d'
FROM old
"""
FILL_ROWS = 500_000


def queue_lengths() -> dict[str, dict[str, float]]:
    """Milliseconds of a pass after one end, and resident memory of the core, by the queue's length."""
    return {f"{length:,} queued": _queue(length) for length in (1_000, 100_000)}


def _queue(length: int) -> dict[str, float]:
    gc.collect()
    before = _resident_bytes()
    core = _core(length)
    running = _submit(core, length)
    resident_mib = (_resident_bytes() - before) / 2**20
    times_ms = []
    for number in range(PASSES):
        action_id = running.pop(0)
        began_s = time.perf_counter()
        commands = core.step([Finished(action_id=action_id, outcome=DONE)], 1.0 + number)
        times_ms.append((time.perf_counter() - began_s) * 1000)
        running += [command.action.id for command in commands if isinstance(command, Execute)]
    return {"pass_ms": median(times_ms), "resident_mib": resident_mib}


def _core(length: int) -> Core:
    node = NodeSpec(name="n", numa=(tuple(range(CORES)),), memory_bytes=2**40)
    bound = 2 * length + CORES
    return build_core(
        ManagerSpec(
            nodes=(node,),
            tasks={"default": TaskSpec(max_queued=bound)},
            scheduler=SchedulerSpec(max_queued=bound),
        )
    )


def _submit(core: Core, length: int) -> list[str]:
    """Fill the cores, then the queue; the actions that run."""
    cost = {"cpu": UnitSet.fixed(1)}
    running: list[str] = []
    for begin in range(0, length + CORES, 1000):
        numbers = range(begin, min(begin + 1000, length + CORES))
        events = [Submitted(action=Action(id=str(number), function="f", cost=cost, t_ori_s=1.0)) for number in numbers]
        commands = core.step(list(events), 0.0)
        running += [command.action.id for command in commands if isinstance(command, Execute)]
    return running


async def old_records(count: int) -> dict[str, dict[str, float]]:
    """Milliseconds from acceptance to a durable end, over an empty database and one full of old records, in turns."""
    with tempfile.TemporaryDirectory() as directory:
        paths = {"empty": Path(directory) / "empty.sqlite", f"{count:,} old records": Path(directory) / "old.sqlite"}
        stores = {name: Store(StoreSpec(path=path)) for name, path in paths.items()}
        for name, store in stores.items():
            await store.open()
            if name != "empty":
                await store.close()
                fill(paths[name], count)
                stores[name] = Store(StoreSpec(path=paths[name]))
                await stores[name].open()
        found: dict[str, list[float]] = {name: [] for name in stores}
        for _ in range(HOT_ROUNDS):
            for name, store in stores.items():
                found[name].append(await _hot_path(store))
        for store in stores.values():
            await store.close()
        return {
            name: {"commit_ms": median(found[name][5:]), "file_mib": paths[name].stat().st_size / 2**20}
            for name in stores
        }


async def _hot_path(store: Store) -> float:
    """Milliseconds for some invocations to be accepted, started and ended, each step committed, and read again."""
    began_s = time.perf_counter()
    records = [_accept(store) for _ in range(TOGETHER)]
    await store.commit()
    for record in records:
        record.move(State.RUNNING)
        store.save(record)
    await store.commit()
    for record in records:
        record.end(State.LOST, Reason.NODE_LOST, "", time.time())
        store.save(record)
    await store.commit()
    for record in records:
        await store.get(record.seq)
    return (time.perf_counter() - began_s) * 1000


def _accept(store: Store) -> Record:
    seq = store.next_seq()
    record = Record(
        seq=seq,
        id=new_id(seq),
        function="f1",
        revision="r",
        task="default",
        trajectory="t1",
        parent=None,
        mode=Mode.ASYNC,
        accepted_s=time.time(),
        input=b'{"a":1}',
        detached=True,
    )
    store.create(record)
    store.save_key(f"f1\n{record.id}", b"digest", seq, time.time() + 86400)
    return record


def fill(path: Path, count: int) -> None:
    """Old, ended records, as a gateway of weeks ago would have left them."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    for begin in range(1, count + 1, FILL_ROWS):
        connection.execute(OLD, (begin, min(count, begin + FILL_ROWS - 1)))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
