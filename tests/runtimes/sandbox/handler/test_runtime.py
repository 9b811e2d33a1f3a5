"""The handler runtime in real process sandboxes: instances, revisions, and the files that they run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from manager.errors import ActionFailed, CapacityExceeded, InvalidConfig, Reason
from manager.function import FunctionSpec, HandlerSpec, SandboxSpec
from runtimes.node.protocol import HandlerArchives
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.handler import sources
from runtimes.sandbox.handler.runtime import HandlerRuntime, HandlerSettings, Instance, _Pool
from runtimes.sandbox.handler.sources import LINES_MAX, HandlerCopies, requirement_lines
from runtimes.sandbox.process import ProcessControl
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.gateway.conftest import until
from tests.runtimes.handlers import handler_in
from tests.runtimes.recorder import execution_of
from tests.runtimes.sandbox.handler.conftest import DEADLINE_S, SCALE, SETTINGS, Function, call

SOURCE = "import time, word\ndef score(event, context):\n    time.sleep(event.get('held_s', 0))\n    return word.WORD\n"
HASH = f"--hash=sha256:{'0a' * 32}"


async def test_print_logging_and_child_processes_are_the_invocations_log(
    runtime: HandlerRuntime, function: Function
) -> None:
    chatty = function("""
        import logging, os, sys
        def score(event, context):
            print("one", 1)
            print("two", file=sys.stderr)
            sys.stdout.buffer.write(b"three")
            logging.getLogger("mine").warning("careful %d", 4)
            context.log("graded", points=5)
            os.system("echo from a child")
            return sys.stdin.read()
    """)
    execution, log = execution_of(chatty, {})
    assert (await runtime.execute(execution)).value == ""
    assert log.text("stdout") == "one 1\nthree"
    assert "two\n" in log.text("stderr") and "from a child\n" in log.text("stderr")
    records = [json.loads(line) for line in log.text("log").splitlines()]
    assert records == [
        {"level": "warning", "logger": "mine", "message": "careful 4"},
        {"level": "info", "message": "graded", "points": 5},
    ]


async def test_an_exception_is_a_handler_error_with_its_traceback(runtime: HandlerRuntime, function: Function) -> None:
    raising = function("""
        def score(event, context):
            raise {"key": KeyError, "exit": SystemExit, "memory": MemoryError}[event["how"]]("why")
    """)
    execution, log = execution_of(raising, {"how": "key"})
    with pytest.raises(ActionFailed, match="KeyError: 'why'") as failure:
        await runtime.execute(execution)
    assert failure.value.reason is Reason.HANDLER_ERROR
    assert failure.value.usage["cpu_s"] > 0.0 and failure.value.usage["peak_memory_bytes"] > 2**20
    trace = str(failure.value.detail["traceback"])
    assert "in score" in trace and "<string>" not in trace
    assert trace in log.text("stderr")
    for how, reason in (("exit", Reason.HANDLER_ERROR), ("memory", Reason.OUT_OF_MEMORY)):
        with pytest.raises(ActionFailed) as failure:
            await call(runtime, raising, how=how)
        assert failure.value.reason is reason
    assert runtime.instances() == {"reward": 1}


async def test_a_handler_that_takes_more_than_its_memory_is_told_so(
    runtime: HandlerRuntime, function: Function, provider: Provider
) -> None:
    if not provider.info.limits["memory"]:
        pytest.skip("this machine's process sandboxes have no bound of memory")
    hungry = function("def score(event, context): return len(bytearray(2**30))")
    with pytest.raises(ActionFailed, match=r"ran out of memory .*; sandbox\.memory bounds it") as failure:
        await call(runtime, hungry)
    assert failure.value.reason is Reason.OUT_OF_MEMORY


@pytest.mark.parametrize("child", ["return 'child'", "raise ValueError('child')", "sys.exit(3)"])
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_child_that_comes_back_out_of_a_handler_answers_for_nobody(
    runtime: HandlerRuntime, function: Function, kind: str, child: str
) -> None:
    forking = function(f"""
        import os, sys
        {kind} score(event, context):
            pid = os.fork()
            if pid == 0:
                {child}
            os.waitpid(pid, 0)
            return f"{{event['n']}} {{os.getpid()}}"
    """)
    answers = [str(await call(runtime, forking, n=n)).split() for n in range(3)]
    assert [each[0] for each in answers] == ["0", "1", "2"]
    assert len({each[1] for each in answers}) == 1, "one process serves them all"


@pytest.mark.parametrize("value", ["{1, 2}", "float('nan')", "b'x'", "'\\ud800'", "(lambda x: x.append(x) or x)([])"])
async def test_a_result_that_is_no_json_is_a_clear_handler_error(
    runtime: HandlerRuntime, function: Function, value: str
) -> None:
    odd = function(f"def score(event, context): return {value}")
    with pytest.raises(ActionFailed, match="which is not JSON") as failure:
        await call(runtime, odd)
    assert failure.value.reason is Reason.HANDLER_ERROR


async def test_a_result_over_the_limit_is_output_limit(runtime: HandlerRuntime, function: Function) -> None:
    wide = function("def score(event, context): return 'x' * event['n']", output_limit_bytes=1000)
    assert await call(runtime, wide, n=998) == "x" * 998
    with pytest.raises(ActionFailed, match="1001 bytes, more than 1000") as failure:
        await call(runtime, wide, n=999)
    assert failure.value.reason is Reason.OUTPUT_LIMIT


@pytest.mark.parametrize(
    ("source", "callable", "message"),
    [
        ("import no_such_module", "score", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def score(event, context): pass", "other", "has no attribute 'other'"),
        ("def score(event): pass", "score", "too many positional arguments"),
        ("import os; os._exit(3)", "score", "ended its own process .exit code 3."),
        ("raise RuntimeError('at import')", "score", "(?s)RuntimeError: at import.*Traceback"),
    ],
)
async def test_a_handler_that_cannot_be_loaded_is_refused_at_registration(
    runtime: HandlerRuntime, function: Function, source: str, callable: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        await runtime.prepare(function(source, callable=callable))
    assert runtime.instances() == {"reward": 0}


async def test_a_handler_that_ends_its_process_fails_its_action_and_is_replaced(
    runtime: HandlerRuntime, function: Function
) -> None:
    fragile = function("""
        import os
        calls = []
        def score(event, context):
            calls.append(1)
            if event["die"] == "exit":
                os._exit(7)
            if event["die"]:
                os.write(2, b"last words")
                os.kill(os.getpid(), event["die"])
            return len(calls)
    """)
    fragile = dataclasses.replace(fragile, sandbox=dataclasses.replace(SETTINGS.sandbox, still_s=0.5))
    assert [await call(runtime, fragile, die=0) for _ in range(2)] == [1, 2]
    for die, reason, message in (
        ("exit", Reason.HANDLER_ERROR, "exit code 7"),
        (11, Reason.HANDLER_ERROR, "signal 11"),
        (9, Reason.ENVIRONMENT_LOST, "was killed"),
        (19, Reason.TIMEOUT, "made no progress: a process of it was stopped"),
    ):
        execution, log = execution_of(fragile, {"die": die})
        with pytest.raises(ActionFailed, match=message) as failure:
            await runtime.execute(execution)
        assert failure.value.reason is reason
        if die != "exit":
            assert failure.value.detail["output"] == "last words"
            assert log.text("stderr") == "last words"
        assert await call(runtime, fragile, die=0) == 1
    assert runtime.instances() == {"reward": 1}


async def test_of_calls_that_share_an_instance_none_is_blamed_for_its_end(
    runtime: HandlerRuntime, function: Function
) -> None:
    shared = function(
        f"""
        import os, threading
        here = threading.Barrier(2, timeout={DEADLINE_S})
        def score(event, context):
            here.wait()
            if event["die"]:
                os._exit(7)
            threading.Event().wait()
        """,
        per_instance=2,
        instances_max=1,
    )
    executions = [execution_of(shared, {"die": die}, id=f"a{die}")[0] for die in (False, True)]
    ends = await asyncio.gather(*(runtime.execute(each) for each in executions), return_exceptions=True)
    for end in ends:
        assert isinstance(end, ActionFailed)
        assert end.reason is Reason.ENVIRONMENT_LOST, "an idempotent one is tried again"
        assert "ended under 2 calls (handler.per_instance)" in end.message and "exit code 7" in end.message


async def test_cancelling_ends_the_instance_and_the_next_action_gets_a_new_one(
    runtime: HandlerRuntime, function: Function
) -> None:
    stuck = function("""
        state = []
        def score(event, context):
            state.append(1)
            if event["stuck"]:
                print("stuck")
                while True:
                    pass
            return len(state)
    """)
    assert await call(runtime, stuck, stuck=False) == 1
    execution, log = execution_of(stuck, {"stuck": True})
    said = asyncio.Event()
    log.write = lambda stream, data: said.set()  # type: ignore[method-assign]  # to know when it runs
    running = asyncio.create_task(runtime.execute(execution))
    async with asyncio.timeout(DEADLINE_S):
        await said.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert execution.ended_s is not None
    assert await call(runtime, stuck, stuck=False) == 1


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_per_instance_invocations_run_together_and_keep_their_logs_apart(
    runtime: HandlerRuntime, function: Function, kind: str
) -> None:
    wait = "await asyncio.to_thread(barrier.wait)" if kind == "async def" else "barrier.wait()"
    together = function(
        f"""
        import asyncio, logging, threading
        barrier = threading.Barrier(3, timeout={DEADLINE_S})
        {kind} score(event, context):
            print("before", event["n"])
            {wait}
            logging.info("after %d", event["n"])
            return [event["n"], threading.active_count() > 0]
        """,
        per_instance=3,
        instances_max=1,
    )
    executions = [execution_of(together, {"n": n}, id=f"a{n}") for n in range(3)]
    results = await asyncio.gather(*(runtime.execute(execution) for execution, _ in executions))
    assert [result.value for result in results] == [[0, True], [1, True], [2, True]]
    for n, (_, log) in enumerate(executions):
        assert log.text("stdout") == f"before {n}\n"
        assert f"after {n}" in log.text("log") and len(log.text("log").splitlines()) == 1
    assert runtime.instances() == {"reward": 1}


async def test_an_async_handler_keeps_its_loop_between_invocations(runtime: HandlerRuntime, function: Function) -> None:
    looping = function("""
        import asyncio
        loops = []
        async def score(event, context):
            await asyncio.sleep(0)
            loops.append(id(asyncio.get_running_loop()))
            return len(set(loops))
    """)
    assert [await call(runtime, looping) for _ in range(3)] == [1, 1, 1]


async def test_instances_are_added_up_to_the_bound_and_idle_ones_end(provider: Provider, function: Function) -> None:
    runtime = HandlerRuntime(provider, SETTINGS)
    meeting = function(
        """
        import pathlib, time
        def score(event, context):
            print("started")
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
        """,
        instances_min=1,
        instances_max=2,
        idle_s=0.3,
    )
    assert meeting.handler is not None
    await runtime.prepare(meeting)
    assert runtime.instances() == {"reward": 1}
    started = asyncio.Semaphore(0)
    executions = [execution_of(meeting, {}, id=f"a{n}") for n in range(4)]
    for _, log in executions:
        log.write = lambda stream, data: started.release()  # type: ignore[method-assign]  # to know when it runs
    async with asyncio.timeout(DEADLINE_S):
        async with asyncio.TaskGroup() as group:
            for execution, _ in executions:
                group.create_task(runtime.execute(execution))
            await started.acquire()
            await started.acquire()
            assert runtime.instances() == {"reward": 2}
            (meeting.handler.directory / "go").touch()
    await until(lambda: runtime.instances() == {"reward": 1})
    await runtime.close()


async def test_closing_fails_what_runs_and_what_waits(provider: Provider, function: Function) -> None:
    runtime = HandlerRuntime(provider, SETTINGS)
    endless = function("def score(event, context):\n    print('runs')\n    while True: pass", instances_max=1)
    started = asyncio.Event()
    execution, log = execution_of(endless, {})
    log.write = lambda stream, data: started.set()  # type: ignore[method-assign]  # to know when it runs
    running = [asyncio.create_task(runtime.execute(execution))]
    async with asyncio.timeout(DEADLINE_S):
        await started.wait()
        running.append(asyncio.create_task(runtime.execute(execution_of(endless, {}, id="a2")[0])))
        await asyncio.wait(running, timeout=0.0)  # the second is waiting for the only slot by now
        await runtime.close()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == [Reason.ENVIRONMENT_LOST] * 2


async def test_the_search_for_orphans_leaves_instances_alone(
    provider: Provider, runtime: HandlerRuntime, function: Function
) -> None:
    environments = Environments(provider)
    environments.exclude(lambda: runtime.sandboxes)
    counting = function("""
        calls = []
        def score(event, context):
            calls.append(1)
            return len(calls)
    """)
    assert await environments.start() == []
    assert await call(runtime, counting) == 1
    await environments._reap()
    assert await call(runtime, counting) == 2
    await environments.close()
    await runtime.close()
    assert runtime.sandboxes == set()


async def test_an_engine_that_makes_no_sandbox_is_a_typed_end_with_the_time_to_come_again(
    runtime: HandlerRuntime, provider: Provider, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object, **__: object) -> None:
        raise CapacityExceeded("the engine does not answer", retry_after_s=3.0)

    monkeypatch.setattr(provider, "create", refuses)
    with pytest.raises(ActionFailed, match="the engine does not answer") as caught:
        await call(runtime, function("def score(event, context): return 1"))
    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.ENVIRONMENT_LOST, 3.0)


async def test_an_instance_that_died_idle_makes_room_for_the_next(
    provider: Provider, runtime: HandlerRuntime, function: Function, tmp_path: Path
) -> None:
    alone = function("def score(event, context): return 1", instances_min=1, instances_max=1)
    await call(runtime, alone)
    ((instance,),) = [pool.instances for pool in runtime._pools.values()]
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: instance.resting)
        (record,) = (tmp_path / "state" / "sandboxes").glob("*/record.json")
        assert isinstance(instance._sandbox, Sandbox)
        await instance._sandbox.kill_for("its disk bound is exceeded")
        await until(lambda: not instance.alive)
        assert await call(runtime, alone) == 1
        assert not record.exists()


async def test_an_instance_that_could_not_be_removed_is_the_reapers(
    provider: Provider, runtime: HandlerRuntime, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = Environments(provider)
    environments.exclude(lambda: runtime.sandboxes)
    assert await call(runtime, function("def score(event, context): return 1")) == 1
    with monkeypatch.context() as broken:

        async def fails(control: ProcessControl) -> None:
            raise CapacityExceeded("the engine does not answer")

        broken.setattr(ProcessControl, "remove", fails)
        await runtime.close()
    assert runtime.sandboxes == set()
    await environments._reap()
    await environments.close()


async def test_a_missing_directory_is_refused_at_registration_and_no_instance_is_made_of_an_empty_one(
    runtime: HandlerRuntime, tmp_path: Path
) -> None:
    handler = HandlerSpec(module="handler", callable="score", directory=tmp_path / "none", **SCALE)  # type: ignore[arg-type]
    spec = FunctionSpec(name="reward", runtime="handler", handler=handler)
    with pytest.raises(InvalidConfig, match="does not exist"):
        await runtime.prepare(spec)
    with pytest.raises(ActionFailed, match="does not exist") as gone:
        await call(runtime, spec)
    assert gone.value.reason is Reason.ENVIRONMENT_LOST


def test_idle_instances_are_looked_after_on_a_gateways_loop(tmp_path: Path) -> None:
    handler = HandlerSpec(module="m", callable="f", directory=tmp_path, **SCALE | {"idle_s": 0.0})  # type: ignore[arg-type]

    async def start(function: FunctionSpec) -> Instance:
        raise AssertionError(f"nobody asked for {function.name}")

    async def look_twice() -> None:
        function = FunctionSpec(name="reward", runtime="handler", handler=handler)
        pool = _Pool(function, start, SETTINGS, lambda work: work.close())
        pool._tidy_within(0.0001)
        pool._tidy_within(0.0)
        await pool.close()

    uvloop.run(look_twice())


async def test_a_directory_that_the_sandbox_cannot_read_is_named_with_the_remedy(
    runtime: HandlerRuntime, function: Function
) -> None:
    spec = function("def score(event, context): return 1")
    assert spec.handler is not None
    spec.handler.directory.chmod(0o700)
    with pytest.raises(InvalidConfig, match=rf"{spec.handler.directory}: chmod -R a\+rX"):
        await runtime.prepare(spec)


BOX = SandboxSpec(memory_bytes=256 * 2**20)


def handler(directory: Path, revision: str = "1") -> FunctionSpec:
    return FunctionSpec(
        name="reward", runtime="handler", revision=revision, timeout_s=60.0, handler=handler_in(directory)
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "handler.py").write_text(SOURCE)
    (directory / "word.py").write_text("WORD = 'old'")
    return directory


async def test_instances_that_begin_later_have_the_code_of_their_revision(
    provider: Provider, tmp_path: Path, source: Path
) -> None:
    copies = HandlerCopies(tmp_path / "copies")
    runtime = HandlerRuntime(provider, HandlerSettings(sandbox=BOX, copies=copies))

    async def told(function: FunctionSpec) -> object:
        """Call it while its warm instance is held, so that another one begins."""
        held = asyncio.create_task(runtime.execute(execution_of(function, {"held_s": 60}, id="held")[0]))
        await asyncio.sleep(0)
        value = (await runtime.execute(execution_of(function, {})[0])).value
        assert not held.done() and runtime.instances() == {"reward": 2}
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        return value

    try:
        first = handler(source)
        await runtime.prepare(first)
        (source / "word.py").write_text("WORD = 'new'")
        assert await told(first) == "old"
        second = handler(source, revision="2")
        await runtime.prepare(second)
        assert (await runtime.execute(execution_of(second, {})[0])).value == "new"
        for _ in iter(lambda: runtime.instances()["reward"] == 1, True):
            await asyncio.sleep(0.01)  # those of the first revision end
        assert await told(second) == "new"
        for name in ("handler.py", "word.py"):
            (source / name).unlink()
        assert await told(second) == "new"
        assert not list((tmp_path / "copies").glob(".*")), "nothing half is left"
    finally:
        await runtime.close()


async def test_what_could_not_be_imported_is_copied_anew_at_the_next_try(
    provider: Provider, tmp_path: Path, source: Path
) -> None:
    runtime = HandlerRuntime(provider, HandlerSettings(sandbox=BOX, copies=HandlerCopies(tmp_path / "copies")))
    try:
        (source / "word.py").write_text("raise RuntimeError('half an edit')")
        with pytest.raises(InvalidConfig, match="half an edit"):
            await runtime.prepare(handler(source))
        (source / "word.py").write_text("WORD = 'mended'")
        await runtime.prepare(handler(source))
        assert (await runtime.execute(execution_of(handler(source), {})[0])).value == "mended"
    finally:
        await runtime.close()


async def test_a_node_that_joins_later_is_sent_what_the_others_run(tmp_path: Path, source: Path) -> None:
    state = tmp_path / "state"
    copies = HandlerCopies(state / ".handlers", [state])
    archives = HandlerArchives(copies)
    first = await archives.of(handler(source))
    (source / "word.py").write_text("WORD = 'new'")
    assert await archives.of(handler(source)) is first, "it is packed once"
    assert (await archives.of(handler(source, revision="2"))).digest != first.digest
    assert (await copies.of(handler(source)) / "word.py").read_text() == "WORD = 'old'"
    assert (await copies.of(handler(source))).stat().st_mode & 0o777 == 0o755
    HandlerCopies(state / ".handlers", [state])
    assert not list((state / ".handlers").glob("*")), "a gateway begins without those of the one before"


async def test_a_directory_that_is_too_large_is_run_as_it_is_and_the_log_says_so(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SOURCES_MAX", 1)
    with capture_logs() as logs:
        assert await HandlerCopies(tmp_path / "copies").of(handler(source)) == source
    assert [each["function"] for each in logs if "as it is" in str(each["event"])] == ["reward"]
    monkeypatch.undo()
    with pytest.raises(InvalidConfig, match="cannot be copied"):
        await HandlerCopies(tmp_path / "copies").of(handler(tmp_path / "nowhere"))


async def test_a_revision_that_is_prepared_and_never_served_takes_nothing_from_the_one_that_is(
    runtime: HandlerRuntime, function: Function
) -> None:
    """As where another function of the same change cannot be prepared."""
    counting = """
        calls = 0
        def score(event, context):
            global calls
            calls += 1
            return calls
    """
    old, new = function(counting, revision="1"), function(counting, revision="2")
    await runtime.prepare(old)
    await runtime.prepare(new)
    assert [await call(runtime, old) for _ in range(3)] == [1, 2, 3]
    assert [await call(runtime, new) for _ in range(3)] == [1, 2, 3]
    await until(lambda: runtime.instances() == {"reward": 1})
    await runtime.prepare(old)  # back to the first one
    assert [await call(runtime, old) for _ in range(2)] == [1, 2]


def test_requirements_are_taken_in_the_words_of_pip(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        f"# of the reward\nsympy==1.13.3   # pinned\n\nlatex2sympy2 \\\n    {HASH} \\\n    {HASH}\n"
    )
    lines = requirement_lines(
        ["regex>=2024", f"tiny==1 {HASH}", 'tomli; python_version < "3.11"', "-r requirements.txt"], tmp_path, True
    )
    assert lines == (
        "regex>=2024",
        f"tiny==1 {HASH}",
        'tomli; python_version < "3.11"',
        "sympy==1.13.3",
        f"latex2sympy2 {HASH} {HASH}",
    )
    assert requirement_lines(["-r elsewhere.txt"], tmp_path, False) == ("-r elsewhere.txt",)


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("two words", "no requirement such as"),
        ("tiny @ https://example.invalid/tiny.whl", "names an address"),
        ("--index-url=https://example.invalid/", "of pip's options only -r FILE and --hash"),
        ("-e .", "of pip's options only"),
        ("tiny==1 --hash=md5:00", "--hash=md5:00 is no sha256:"),
        ("./tiny.whl", "no requirement such as"),
        ("tiny\n--index-url https://example.invalid/", "no requirement such as"),
        ("x" * 5000, "longer than 4000 characters"),
        ("-r ../outside.txt", "outside of the function's directory"),
        ("-r none.txt", "cannot be read"),
        ("-r bad.txt", "bad.txt:2: '-e .'"),
    ],
)
def test_what_else_pip_would_take_is_refused_by_its_place(tmp_path: Path, listed: str, told: str) -> None:
    (tmp_path / "bad.txt").write_text("tiny\n-e .\n")
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        requirement_lines([listed], tmp_path, True)


def test_their_number_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"more than {LINES_MAX}"):
        requirement_lines(["tiny"] * (LINES_MAX + 1), tmp_path, True)
