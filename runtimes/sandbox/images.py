"""What is told of container images, and who keeps them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from manager.errors import InvalidConfig
from manager.function import Setting

#: What engines take for the name of an image: [registry[:port]/]part[/part ...][:tag][@digest], or an image's id. It
#: becomes a part of a request's path, in which anything else could lead to another route of the engine.
_NAME = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5}(?=/))?"
    r"(?:[._-]+[A-Za-z0-9]+)*(?:/[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z0-9+._-]+:[0-9A-Fa-f]{32,})?",
)
NAME_MAX_CHARS = 1024


def require_image_name(image: str) -> None:
    """Raise InvalidConfig unless it is the name of an image, a digest or an id."""
    if len(image) > NAME_MAX_CHARS or _NAME.fullmatch(image) is None:
        raise InvalidConfig(
            f"{image[:200]!r} is no name of an image: [registry[:port]/]name[:tag][@digest]", component="sandbox.images"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLogin:
    """Who pulls from a registry."""

    username: Annotated[str, Setting("user name")]
    password: Annotated[
        str,
        Setting(
            "password or token; a reference: ${secret:NAME}",
            pattern=r"^\$\{secret:[^}]+\}$",
            words="a reference to a secret, ${secret:NAME}",
        ),
    ]


@dataclass(slots=True, kw_only=True)
class ImageState:
    """One image as it is."""

    image: str
    state: Literal["pulling", "present", "failed"]
    size_bytes: int = 0
    #: Of a pull: what has arrived, and what is known to come.
    done_bytes: int = 0
    total_bytes: int = 0
    #: Whether this gateway has pulled it, and so may remove it.
    pulled: bool = False
    #: Time of day of its last use.
    used_s: float = 0.0
    #: Whether it is kept whatever the bound: a function's, or needed just now.
    kept: bool = False
    #: Why its last pull failed, in the registry's words.
    problem: str = ""


class ImageKeeper(Protocol):
    """Pulls images, and keeps those that it has pulled within a bound."""

    #: Most bytes of the images that were pulled; 0 without a bound.
    bound_bytes: int

    def begin(self, image: str) -> None:
        """Begin to pull an image unless that is under way; `states` tells what becomes of it."""
        ...

    async def settled(self, images: Sequence[str], within_s: float) -> None:
        """Return when none of these is being pulled any more, or after so many seconds."""
        ...

    async def require(self, image: str) -> object:
        """Return when it is here, pulled if need be; raises InvalidConfig or CapacityExceeded, as the registry says."""
        ...

    async def states(self) -> list[ImageState]:
        """Return every image of the engine that has a name, and those that are pulled or could not be."""
        ...
