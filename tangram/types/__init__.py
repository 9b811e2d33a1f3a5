"""The wire types: one declaration for each noun that crosses the wire; JSON, documents and results come from them.

Answers may hold fields that are not named here: a newer server tells more. A field that may be left out is `UNSET`,
which is false, where it was; null is None.
"""

from msgspec import UNSET, UnsetType

from tangram.types.activity import ActivityInfo, ActSplit, FailureCount
from tangram.types.batches import BatchAnswer, BatchItem, BatchRequest, BatchVerdict
from tangram.types.files import FileEntry, FileList, FileWritten
from tangram.types.functions import (
    ConfigDiff,
    ConfigFile,
    ConfigFiles,
    DurationInfo,
    FunctionInfo,
    FunctionList,
    LearnedInfo,
    RetryInfo,
    SandboxInfo,
    UnitsInfo,
    WarmInfo,
)
from tangram.types.health import Health
from tangram.types.invocations import Attempt, Invocation, InvocationPage, Purged
from tangram.types.logs import (
    LogAccepted,
    LogEnd,
    LogHeartbeat,
    LogLag,
    LogLine,
    LogRecord,
    LogResult,
    read_log_record,
)
from tangram.types.problems import Problem
from tangram.types.resources import (
    DeviceInfo,
    HolderInfo,
    HostImagesInfo,
    ModelDevice,
    ModelsInfo,
    NodeInfo,
    PlacedModel,
    PoolInfo,
    RegionInfo,
    ResidentInfo,
    ResourcesInfo,
    SandboxesInfo,
    ServiceInfo,
)
from tangram.types.scalars import Mode, Reason, State
from tangram.types.scheduling import (
    CauseCount,
    QueueEntry,
    QueuePage,
    TaskInfo,
    TaskList,
    TrajectoryInfo,
    TrajectoryOpening,
    TrajectoryPage,
    WaitCause,
)

__all__ = [
    "UNSET",
    "ActSplit",
    "ActivityInfo",
    "Attempt",
    "BatchAnswer",
    "BatchItem",
    "BatchRequest",
    "BatchVerdict",
    "CauseCount",
    "ConfigDiff",
    "ConfigFile",
    "ConfigFiles",
    "DeviceInfo",
    "DurationInfo",
    "FailureCount",
    "FileEntry",
    "FileList",
    "FileWritten",
    "FunctionInfo",
    "FunctionList",
    "Health",
    "HolderInfo",
    "HostImagesInfo",
    "Invocation",
    "InvocationPage",
    "LearnedInfo",
    "LogAccepted",
    "LogEnd",
    "LogHeartbeat",
    "LogLag",
    "LogLine",
    "LogRecord",
    "LogResult",
    "Mode",
    "ModelDevice",
    "ModelsInfo",
    "NodeInfo",
    "PlacedModel",
    "PoolInfo",
    "Problem",
    "Purged",
    "QueueEntry",
    "QueuePage",
    "Reason",
    "RegionInfo",
    "ResidentInfo",
    "ResourcesInfo",
    "RetryInfo",
    "SandboxInfo",
    "SandboxesInfo",
    "ServiceInfo",
    "State",
    "TaskInfo",
    "TaskList",
    "TrajectoryInfo",
    "TrajectoryOpening",
    "TrajectoryPage",
    "UnitsInfo",
    "UnsetType",
    "WaitCause",
    "WarmInfo",
    "read_log_record",
]
