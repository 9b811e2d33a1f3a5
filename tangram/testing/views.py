"""What a scripted gateway says of itself: the least that the wire types ask for."""

from __future__ import annotations

from tangram.testing.script import BEGINNING
from tangram.types import (
    DurationInfo,
    FunctionInfo,
    HostImagesInfo,
    Invocation,
    ModelsInfo,
    QueueEntry,
    ResourcesInfo,
    RetryInfo,
    SandboxesInfo,
    StepInfo,
    TrajectoryInfo,
    WaitCause,
)

#: What a submitted invocation waits for.
WAITS_FOR = "somebody who waits for it"


def function_info(name: str) -> FunctionInfo:
    """Return the description of a scripted function."""
    return FunctionInfo(
        name=name,
        runtime="handler",
        revision="scripted",
        description="scripted",
        cost={"cpu": 1},
        duration=DurationInfo(profile="learned", key="", initial_s=None),
        timeout_s=300.0,
        queue_timeout_s=3600.0,
        idempotent=False,
        max_queued=1000,
        output_limit_bytes=0,
        log_limit_bytes=0,
        retry=RetryInfo(max_attempts=1, backoff_s=1.0, backoff_max_s=60.0, jitter="none", on=(), on_status=()),
    )


def resources_info() -> ResourcesInfo:
    """Return the description of a gateway that has nothing."""
    return ResourcesInfo(
        nodes=(),
        pools={},
        sandboxes=SandboxesInfo(
            kind="process",
            engine="scripted",
            isolation="none: nothing is run",
            runtime="",
            runtimes=(),
            limits={},
            weakenings=(),
        ),
        models=ModelsInfo(
            actions=0,
            executions=0,
            swaps=0,
            hit_rate=0.0,
            evictions=0,
            restore_s=0.0,
            restored_bytes=0,
            devices=(),
            services={},
            host_images=HostImagesInfo(),
        ),
    )


def trajectory_info(name: str, task: str) -> TrajectoryInfo:
    """Return the description of a living trajectory."""
    return TrajectoryInfo(
        trajectory=name,
        task=task,
        node="scripted",
        memory_bytes=0,
        ttl_s=1800.0,
        state="idle",
        queued=0,
        active=None,
        idle_s=0.0,
    )


def waiting_entry(record: Invocation) -> QueueEntry:
    """Return the description of a submitted invocation that nobody has waited for yet."""
    return QueueEntry(
        id=record.id,
        function=record.function,
        task=record.task,
        trajectory=record.trajectory,
        age_s=0.0,
        cost={"cpu": (1, 1)},
        waits_for=WAITS_FOR,
        cause=WaitCause(kind="units", text=WAITS_FOR),
    )


def step_info(task: str, step: int, expected: int) -> StepInfo:
    """Return the description of a step that was told of; nothing is counted."""
    return StepInfo(
        task=task,
        step=step,
        expected=expected,
        living=0,
        ended=0,
        opened_at=BEGINNING,
        ended_at=None,
        ends_in_s=None,
    )
