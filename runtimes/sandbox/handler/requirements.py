"""What a handler needs from a package index: how its YAML says so, and where the gateway lets it come from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from packaging.requirements import InvalidRequirement, Requirement

from manager.function import AllowedPlace, Setting

#: Bounds of what one function may ask for, and of a file that lists it.
LINES_MAX, LINE_CHARS, FILE_BYTES = 500, 4000, 2**20
_FILE = re.compile(r"-r\s+(\S.*)")
_HASH = re.compile(r"\s+--hash=(\S+)")
_DIGEST = re.compile(r"sha(256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementSettings:
    """Where the requirements of handlers come from, and the layers that are built of them.

    Without an index and a directory of wheels functions with requirements are refused.
    """

    index_url: Annotated[
        str,
        Setting(
            "the package index, as pip takes it; ${secret:NAME} stands for a secret. pip reaches it from a sandbox "
            "with network: egress",
            pattern=r"^(https?://\S+)?$",
            words="an address that begins with http:// or https://",
        ),
    ] = ""
    find_links: Annotated[
        Path | None, Setting("a directory of wheels on the gateway's machine, beside the index or instead of it")
    ] = None
    allow: Annotated[
        tuple[AllowedPlace, ...],
        Setting("hosts that pip may reach, as in a sandbox's allow; by default the public world"),
    ] = ()
    only_binary: Annotated[
        bool, Setting("takes wheels only: to install one runs nothing of it, to build a source package does")
    ] = True
    builds: Annotated[int, Setting("layers that are built at once; more wait", ge=1)] = 2
    timeout_s: Annotated[float, Setting("longest build of one layer", gt=0)] = 600.0
    memory_bytes: Annotated[int, Setting("bytes that a build may hold", ge=1)] = 2**30
    layer_max_bytes: Annotated[int, Setting("most bytes of one layer", key="layer_max", ge=1)] = 2 * 2**30
    max_bytes: Annotated[
        int,
        Setting(
            "most bytes of all layers: beyond it those used least recently are removed, never one of a function that "
            "is served",
            key="max",
            ge=1,
        ),
    ] = 10 * 2**30

    def refusal(self) -> str:
        """Return why functions with requirements are refused, and what mends it; empty if they are taken."""
        if self.index_url or self.find_links is not None:
            return ""
        return (
            "it has requirements, and this gateway takes none: name a package index (sandbox.requirements.index_url) "
            "or a directory of wheels (sandbox.requirements.find_links)"
        )


def requirement_lines(listed: Sequence[str], directory: Path, look: bool) -> tuple[str, ...]:
    """Return the requirements, those of files in the place of ``-r FILE``, each as pip takes it.

    With ``look`` files are read, from below the function's ``directory``; without they stay as they are named. Raises
    ValueError with what is wrong, and in which file and line.
    """
    found: list[str] = []
    for text in listed:
        named = _FILE.fullmatch(text.strip())
        if named is None:
            found.append(_checked(text, ""))
        elif look:
            found += _of_file(named[1].strip(), directory)
        else:
            found.append(text.strip())
    if len(found) > LINES_MAX:
        raise ValueError(f"{len(found)} requirements, more than {LINES_MAX}")
    return tuple(found)


def _of_file(name: str, directory: Path) -> Iterator[str]:
    root = directory.resolve()
    file = (root / name).resolve()
    if not file.is_relative_to(root):
        raise ValueError(f"{name} is outside of the function's directory")
    try:
        with file.open("rb") as opened:
            data = opened.read(FILE_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
    if len(data) > FILE_BYTES:
        raise ValueError(f"{name} has more than {FILE_BYTES} bytes")
    whole, begun = "", 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        begun = number if not whole else begun
        if line.endswith("\\"):
            whole += f"{line[:-1]} "
            continue
        stated = re.sub(r"(^|\s)#.*$", "", whole + line).strip()
        whole = ""
        if stated:
            yield _checked(stated, f"{name}:{begun}: ")


def _checked(text: str, place: str) -> str:
    """Return one requirement in one line; raises ValueError."""
    hashes = _HASH.findall(f" {text}")
    bare = _HASH.sub("", text).strip()
    shown = f"{place}{bare[:200]!r}"
    if len(text) > LINE_CHARS:
        raise ValueError(f"{shown} is longer than {LINE_CHARS} characters")
    if bare.startswith("-"):
        raise ValueError(
            f"{shown}: of pip's options only -r FILE and --hash can be said; sandbox.requirements has others"
        )
    try:
        requirement = Requirement(bare)
    except InvalidRequirement as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f'{shown} is no requirement such as "name>=1.2": {reason}') from None
    if requirement.url is not None:
        raise ValueError(f"{shown} names an address; requirements come from where sandbox.requirements says")
    wrong = next((each for each in hashes if not _DIGEST.fullmatch(each)), None)
    if wrong is not None:
        raise ValueError(f"{shown}: --hash={wrong[:80]} is no sha256:, sha384: or sha512: with its digits")
    return " ".join([str(requirement), *(f"--hash={each}" for each in hashes)])
