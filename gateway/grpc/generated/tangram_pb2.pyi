from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InvokeRequest(_message.Message):
    __slots__ = ("function", "input_json", "trajectory", "task", "parent", "idempotency_key", "timeout_s", "max_age_s", "traceparent", "detached", "tracestate", "step", "callback_url", "living")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    INPUT_JSON_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CALLBACK_URL_FIELD_NUMBER: _ClassVar[int]
    LIVING_FIELD_NUMBER: _ClassVar[int]
    function: str
    input_json: bytes
    trajectory: str
    task: str
    parent: str
    idempotency_key: str
    timeout_s: float
    max_age_s: float
    traceparent: str
    detached: bool
    tracestate: str
    step: int
    callback_url: str
    living: bool
    def __init__(self, function: _Optional[str] = ..., input_json: _Optional[bytes] = ..., trajectory: _Optional[str] = ..., task: _Optional[str] = ..., parent: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., timeout_s: _Optional[float] = ..., max_age_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., detached: _Optional[bool] = ..., tracestate: _Optional[str] = ..., step: _Optional[int] = ..., callback_url: _Optional[str] = ..., living: _Optional[bool] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("id", "timeout_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    timeout_s: float
    def __init__(self, id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class TailLogsRequest(_message.Message):
    __slots__ = ("id", "offset", "follow")
    ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    id: str
    offset: int
    follow: bool
    def __init__(self, id: _Optional[str] = ..., offset: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class InvokeBatchRequest(_message.Message):
    __slots__ = ("calls", "wait", "timeout_s")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[InvokeRequest]
    wait: str
    timeout_s: float
    def __init__(self, calls: _Optional[_Iterable[_Union[InvokeRequest, _Mapping]]] = ..., wait: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class BatchVerdict(_message.Message):
    __slots__ = ("index", "invocation", "problem", "replayed")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    index: int
    invocation: Invocation
    problem: BatchProblem
    replayed: bool
    def __init__(self, index: _Optional[int] = ..., invocation: _Optional[_Union[Invocation, _Mapping]] = ..., problem: _Optional[_Union[BatchProblem, _Mapping]] = ..., replayed: _Optional[bool] = ...) -> None: ...

class BatchProblem(_message.Message):
    __slots__ = ("status", "code", "message", "component", "retry_after_s", "json")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    status: int
    code: str
    message: str
    component: str
    retry_after_s: float
    json: bytes
    def __init__(self, status: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., component: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., json: _Optional[bytes] = ...) -> None: ...

class Invocation(_message.Message):
    __slots__ = ("id", "function", "task", "trajectory", "state", "reason", "message", "component", "result_json", "queue_ms", "overhead_ms", "execution_ms", "units", "node", "attempt", "record_json")
    class UnitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_MS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    function: str
    task: str
    trajectory: str
    state: str
    reason: str
    message: str
    component: str
    result_json: bytes
    queue_ms: float
    overhead_ms: float
    execution_ms: float
    units: _containers.ScalarMap[str, int]
    node: str
    attempt: int
    record_json: bytes
    def __init__(self, id: _Optional[str] = ..., function: _Optional[str] = ..., task: _Optional[str] = ..., trajectory: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., component: _Optional[str] = ..., result_json: _Optional[bytes] = ..., queue_ms: _Optional[float] = ..., overhead_ms: _Optional[float] = ..., execution_ms: _Optional[float] = ..., units: _Optional[_Mapping[str, int]] = ..., node: _Optional[str] = ..., attempt: _Optional[int] = ..., record_json: _Optional[bytes] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("offset", "time_s", "stream", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    time_s: float
    stream: str
    data: str
    def __init__(self, offset: _Optional[int] = ..., time_s: _Optional[float] = ..., stream: _Optional[str] = ..., data: _Optional[str] = ...) -> None: ...

class InvokeEvent(_message.Message):
    __slots__ = ("accepted", "log", "ended")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    accepted: Invocation
    log: LogRecord
    ended: Invocation
    def __init__(self, accepted: _Optional[_Union[Invocation, _Mapping]] = ..., log: _Optional[_Union[LogRecord, _Mapping]] = ..., ended: _Optional[_Union[Invocation, _Mapping]] = ...) -> None: ...

class OpenTrajectoryRequest(_message.Message):
    __slots__ = ("trajectory", "function", "task", "sandbox", "snapshot", "step", "lease_s")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    function: str
    task: str
    sandbox: ChosenSandbox
    snapshot: str
    step: int
    lease_s: float
    def __init__(self, trajectory: _Optional[str] = ..., function: _Optional[str] = ..., task: _Optional[str] = ..., sandbox: _Optional[_Union[ChosenSandbox, _Mapping]] = ..., snapshot: _Optional[str] = ..., step: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class ChosenSandbox(_message.Message):
    __slots__ = ("image", "env", "workdir", "user", "memory", "network", "idle_ttl")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    IDLE_TTL_FIELD_NUMBER: _ClassVar[int]
    image: str
    env: _containers.ScalarMap[str, str]
    workdir: str
    user: str
    memory: str
    network: str
    idle_ttl: str
    def __init__(self, image: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., workdir: _Optional[str] = ..., user: _Optional[str] = ..., memory: _Optional[str] = ..., network: _Optional[str] = ..., idle_ttl: _Optional[str] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("trajectory", "json")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    json: bytes
    def __init__(self, trajectory: _Optional[str] = ..., json: _Optional[bytes] = ...) -> None: ...

class WriteFileRequest(_message.Message):
    __slots__ = ("target", "data")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    target: FileTarget
    data: bytes
    def __init__(self, target: _Optional[_Union[FileTarget, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class FileTarget(_message.Message):
    __slots__ = ("trajectory", "path", "mode", "user", "living")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    LIVING_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    path: str
    mode: str
    user: str
    living: bool
    def __init__(self, trajectory: _Optional[str] = ..., path: _Optional[str] = ..., mode: _Optional[str] = ..., user: _Optional[str] = ..., living: _Optional[bool] = ...) -> None: ...

class FileWritten(_message.Message):
    __slots__ = ("path", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ReadFileRequest(_message.Message):
    __slots__ = ("trajectory", "path", "user", "living")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    LIVING_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    path: str
    user: str
    living: bool
    def __init__(self, trajectory: _Optional[str] = ..., path: _Optional[str] = ..., user: _Optional[str] = ..., living: _Optional[bool] = ...) -> None: ...

class FilePiece(_message.Message):
    __slots__ = ("data", "size_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    size_bytes: int
    def __init__(self, data: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class EndTrajectoryRequest(_message.Message):
    __slots__ = ("trajectory",)
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    def __init__(self, trajectory: _Optional[str] = ...) -> None: ...

class EndTrajectoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
