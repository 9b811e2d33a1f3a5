"""What crosses the pipes between the gateway and the model processes: plain frozen values, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manager.errors import Reason
from manager.function import ModelAction
from runtimes.model.checkpoint.layout import Layout
from runtimes.model.request import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One sequence, as token ids, and what is asked of it: actions that share a service may share a batch."""

    ids: tuple[int, ...]
    action: ModelAction
    sampling: Sampling | None = None
    #: Likeliest tokens to tell of each position (`logprobs`); None tells the actual token's number alone.
    top: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Of every token of a sequence but the first: log-probability, rank from 1 on, and the likeliest in its place."""

    logprobs: list[float]
    ranks: list[int]
    #: [token id, log-probability], likeliest first.
    top: list[list[list[int | float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """New tokens of one sequence, and why they end: ``stop`` (an end token) or ``length``."""

    ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """A filled host image: its identity, its path for mapping, and its layout."""

    id: str
    path: str
    layout: Layout


# To a device's process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Map an image (and pin it on CUDA) before the first restore from it."""

    image: ImageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Unmap an image; slots restored from it stay."""

    image_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A service on a chunk, from the point of view of one of its ranks."""

    service: str
    image_id: str
    dop: int
    rank: int
    #: First device of the chunk.
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Bring a service in beside what computes if it fits; answered by whether it did."""

    place: Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Compute one action, or one batch of actions of the same service; restores the service first if need be."""

    place: Placed
    items: tuple[WorkItem, ...]
    budget_tokens: int
    #: Services that the manager chose to evict for this one.
    evict: tuple[str, ...] = ()
    #: Rendezvous file of the chunk's group; its name is new with every new set of processes.
    group: str = ""
    #: CPU cores granted (``cpu`` devices); empty leaves the device's own bound.
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Release every slot of these services."""

    services: tuple[str, ...]


# To the tokenizer process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Check a checkpoint and lay out its image under a head."""

    path: Path
    head: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A usable checkpoint: its layout and fingerprint."""

    layout: Layout
    fingerprint: str
    #: The tokens that end a generation, as the checkpoint's configuration has them.
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Read a checkpoint into the shared memory at ``image_path``."""

    path: Path
    layout: Layout
    image_path: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Turn texts or conversations into token ids."""

    path: Path
    fingerprint: str
    texts: tuple[str, ...] = ()
    conversations: tuple[tuple[Mapping[str, object], ...], ...] = ()
    limit: int
    #: The side on which what is longer is cut; empty: it is refused.
    cut: str
    #: Whether the conversation is to be continued (generate) or judged as it is.
    continued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """Token ids by sequence, and which sequences were cut."""

    ids: tuple[tuple[int, ...], ...]
    truncated: tuple[int, ...]
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Turn generated ids into texts."""

    path: Path
    fingerprint: str
    ids: tuple[tuple[int, ...], ...]


# Back to the gateway.


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """One slot of one device."""

    service: str
    dop: int
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Measured in one run of one rank, in seconds and bytes."""

    restored: bool = False
    restore_s: float = 0.0
    restore_bytes: int = 0
    compute_s: float = 0.0
    evict_s: float = 0.0
    tokens: int = 0
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame of every process."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A sign of life of a request; ``restored`` when its weights have arrived."""

    request: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One sequence of a request has ended before the others; what was measured until then."""

    request: int
    position: int
    value: object
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The answer to a request."""

    request: int
    value: object = None
    usage: Usage = field(default_factory=Usage)
    #: None from processes that hold no device.
    resident: tuple[Resident, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request that could not be done. ``broken`` marks a process that should be replaced."""

    request: int
    kind: str
    message: str
    reason: Reason = Reason.MODEL_ERROR
    broken: bool = False
    resident: tuple[Resident, ...] | None = None


#: What is sent down a pipe: the number of the request and what is asked.
Request = tuple[int, object]
