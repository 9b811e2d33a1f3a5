"""Sources of handlers, their copies and requirements."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import structlog
from packaging.requirements import InvalidRequirement, Requirement

from manager.errors import InvalidConfig, exhaustion
from manager.function import AllowedPlace, FunctionSpec, Setting

COMPONENT = "handler"
#: Bounds of what a handler's digest covers; beyond them the function is refused.
SOURCES_MAX = 2000
SOURCES_LIMIT_BYTES = 64 * 2**20


def handler_problem(directory: Path, module: str, callable_name: str) -> str | None:
    """What is wrong with a handler, or None: its file exists, parses, and names the callable at its top level."""
    file = source_of(directory, module)
    if file is None:
        return f"no {module.replace('.', '/')}.py in {directory}: the handler's module stands beside its YAML file"
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return f"{file}:{line} is not Python: {getattr(error, 'msg', None) or error}"
    except OSError as error:
        if short := exhaustion(error, COMPONENT):
            raise short from None
        return f"{file} cannot be read: {error.strerror}"
    names = set(_top_level_names(tree.body))
    if callable_name in names or "*" in names:
        return None
    functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return f"{file} has no {callable_name!r}" + (f"; it defines {', '.join(functions)}" if functions else "")


def source_of(directory: Path, module: str) -> Path | None:
    """The file of a module under ``directory``: ``a/b.py`` or ``a/b/__init__.py``."""
    base = directory.joinpath(*module.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def sources_digest(directory: Path) -> str:
    """A digest of every Python file under ``directory``; raises ValueError beyond the bounds."""
    digest = hashlib.sha256()
    total_bytes = 0
    for count, file in enumerate(sorted(_python_files(directory))):
        data = file.read_bytes()
        total_bytes += len(data)
        if count >= SOURCES_MAX or total_bytes > SOURCES_LIMIT_BYTES:
            raise ValueError(f"{directory} holds too much Python for a handler: give it a directory of its own")
        digest.update(f"{file.relative_to(directory)}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        digest.update(data)
    return digest.hexdigest()


def _python_files(directory: Path) -> Iterator[Path]:
    for file in directory.rglob("*.py"):
        inside = file.relative_to(directory).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inside):
            yield file


def _top_level_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names bound by a module's top level, conditional branches included; ``*`` for a star import."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If() | ast.Try():
                yield from _top_level_names([*node.body, *node.orelse])
                if isinstance(node, ast.Try):
                    yield from _top_level_names([*node.finalbody, *(each for h in node.handlers for each in h.body)])
            case _:
                continue


class HandlerFile(NamedTuple):
    """One file of a handler."""

    name: str
    path: Path
    size_bytes: int
    executable: bool

    @property
    def mode(self) -> int:
        """Its mode wherever it is copied to."""
        return 0o755 if self.executable else 0o644


def handler_files(directory: Path, excluded: frozenset[Path]) -> list[HandlerFile]:
    """Return the files that are the handler's, in order of the names.

    That is every Python file, and whatever else all users of the machine may read, as a sandbox's own user must; but
    nothing hidden, nothing that Python compiles, nothing of the excluded directories, and no link to what is none of
    these itself. Raises InvalidConfig for more than a handler may have, OSError.
    """
    root = directory.resolve(strict=True)
    matches: list[HandlerFile] = []
    size_bytes = 0
    for each in _walked(root, excluded):
        size_bytes += each.size_bytes
        if len(matches) >= SOURCES_MAX or size_bytes > SOURCES_LIMIT_BYTES:
            raise too_much(directory)
        matches.append(each)
    return sorted(matches)


def _walked(root: Path, excluded: frozenset[Path]) -> Iterator[HandlerFile]:
    closed: set[Path] = set()  # directories that not everybody may enter
    for place, folders, names in os.walk(root):
        folder = Path(place)
        folders[:] = [name for name in folders if not _stays(name) and folder / name not in excluded]
        if folder in closed:
            closed |= {folder / name for name in folders}
        else:
            closed |= {folder / name for name in folders if not (folder / name).stat().st_mode & stat.S_IXOTH}
        for name in names:
            path = folder / name
            real = Path(os.path.realpath(path))
            if _stays(name) or not path.is_file() or (real != path and not _within(root, real, excluded)):
                continue
            known = path.stat()
            python = name.endswith(".py") and real.name.endswith(".py")
            entered = folder not in closed and (real == path or _entered(root, real))
            if python or (known.st_mode & stat.S_IROTH and entered):
                relative = str(path.relative_to(root))
                yield HandlerFile(relative, path, known.st_size, bool(known.st_mode & stat.S_IXUSR))


def _stays(name: str) -> bool:
    """Return whether nothing of this name travels."""
    return name[0] == "." or name == "__pycache__"


def _within(root: Path, real: Path, excluded: frozenset[Path]) -> bool:
    """Return whether a file that a link leads to lies where files travel from."""
    if not real.is_relative_to(root) or any(map(_stays, real.relative_to(root).parts)):
        return False
    return excluded.isdisjoint(_between(root, real))


def _between(root: Path, real: Path) -> list[Path]:
    """Return the directories in which a file lies, below the root."""
    return [each for each in real.parents if each != root and each.is_relative_to(root)]


def _entered(root: Path, real: Path) -> bool:
    """Return whether everybody may enter each directory between the root and a file in it."""
    return all(each.stat().st_mode & stat.S_IXOTH for each in _between(root, real))


def too_much(directory: Path) -> InvalidConfig:
    """Return what is said of a directory that holds more than a handler may have."""
    return InvalidConfig(
        f"{directory} holds more than {SOURCES_MAX} files or {SOURCES_LIMIT_BYTES >> 20} MiB, which is too "
        "much for a handler: give the handler a directory of its own",
        component=COMPONENT,
    )


# What a revision of a handler runs: a copy of its directory, as it was when the revision was first prepared.
#
# A file that is edited while the gateway serves would else be taken by the instances that begin later, and by the nodes
# that join later, beside those that have the old one: two codes under one revision.

_LOG = structlog.get_logger("sandbox.handler")

#: Copies that are kept until the next start; functions that are prepared beyond it run their directories as they are.
COPIES_MAX = 1000


class HandlerCopies:
    """The copies of a gateway's handlers: each a directory of ``root``, named by the digest of what is in it.

    Use from one event loop. Without a root every handler runs its own directory, as on a node, which has copies only.
    """

    def __init__(self, root: Path | None = None, excluded: Collection[Path] = ()) -> None:
        """Nothing of the ``excluded`` directories is ever copied, such as the gateway's own state.

        What is in the root, of the gateway before, is removed: revisions are read anew at each start.
        """
        self.root = None if root is None else root.absolute()
        if self.root is not None:
            shutil.rmtree(self.root, ignore_errors=True)
        self.excluded = frozenset(path.resolve() for path in excluded)
        #: By name and revision.
        self._places: dict[tuple[str, str], Path] = {}
        self._one = asyncio.Lock()

    async def of(self, function: FunctionSpec) -> Path:
        """Return the directory that this revision runs, which is there from its first preparation on.

        A handler's directory that is too large to be copied is that itself, and the log says so. Raises InvalidConfig
        for files that cannot be read, StorageUnavailable or CapacityExceeded where this machine ran short.
        """
        assert function.handler is not None, f"{function.name} has no handler"
        directory, key = function.handler.directory, (function.name, function.revision)
        if self.root is None:
            return directory
        async with self._one:
            known = self._places.get(key)
            if known is None:
                known = self._places[key] = await asyncio.to_thread(self._copied, function.name, directory)
            while len(self._places) > COPIES_MAX:
                del self._places[next(iter(self._places))]
        return known

    def forget(self, function: FunctionSpec) -> None:
        """Copy this revision anew when it is prepared again: it could not be imported as it is."""
        self._places.pop((function.name, function.revision), None)

    def _copied(self, name: str, directory: Path) -> Path:
        assert self.root is not None
        try:
            entry = handler_files(directory, self.excluded)
        except InvalidConfig as error:
            _LOG.warning(
                "a handler runs its directory as it is: what is edited there is taken by the instances that begin "
                "later, before it is applied",
                function=name,
                why=error.message,
            )
            return directory
        except OSError as error:
            raise exhaustion(error, COMPONENT) or _unreadable(directory, error) from None
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            if sum(1 for _ in self.root.iterdir()) >= COPIES_MAX:
                _LOG.warning(
                    "too many versions of handlers since the start: this one runs its directory as it is", function=name
                )
                return directory
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".new-") as created:
                files = Path(created, "files")
                files.mkdir(mode=0o755)
                place = self.root / _copy(entry, files)
                with suppress(OSError):  # the same files are there already
                    files.rename(place)
                if place.is_dir():
                    return place
        except OSError as error:
            raise exhaustion(error, COMPONENT) or _unreadable(directory, error) from None
        raise InvalidConfig(f"the files of {directory} cannot be kept in {self.root}", component=COMPONENT)


def _copy(matches: list[HandlerFile], target: Path) -> str:
    """Copy files into a directory; return the digest of their names, modes and bytes."""
    digest, left_bytes = hashlib.sha256(), SOURCES_LIMIT_BYTES
    for each in matches:
        data = each.path.read_bytes()
        left_bytes -= len(data)
        if left_bytes < 0:
            raise OSError(f"{each.path} grew while it was copied")
        file = target / each.name
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(each.mode)
        digest.update(os.fsencode(f"{each.name}\0{each.mode:o}\0{len(data)}\0") + data)
    for place in (target, *(each for each in target.rglob("*") if each.is_dir())):
        place.chmod(0o755)  # whatever the umask is
    return digest.hexdigest()


def _unreadable(directory: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(f"the files of {directory} cannot be copied: {error}", component=COMPONENT)


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
    #: Layers that are built at once; more wait: each is a sandbox that downloads and unpacks.
    builds: int = 2
    #: Seconds for the longest build of one layer.
    timeout_s: float = 600.0
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
    matches: list[str] = []
    for text in listed:
        named = _FILE.fullmatch(text.strip())
        if named is None:
            matches.append(_checked(text, ""))
        elif look:
            matches += _of_file(named[1].strip(), directory)
        else:
            matches.append(text.strip())
    if len(matches) > LINES_MAX:
        raise ValueError(f"{len(matches)} requirements, more than {LINES_MAX}")
    return tuple(matches)


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
