"""Runs Python's `site` with the project kept out, until it is let in. Standard library only, Python 3.7 on.

The process began with ``-S``: nothing of `site` has run. An installation may name directories of the project: in the
lines of its ``.pth`` files, by their code, or by finders of projects that are installed in development mode. From each
of them whoever wrote the project would be imported before pytest is, as ``sitecustomize`` or as a part of a plugin.
"""

# Paths may be any bytes, and Path imports more than it is worth here.
# ruff: noqa: PTH100, PTH110, PTH114, PTH116, PTH118, PTH120, PTH123
from __future__ import annotations

import opcode
import os
import re
import site
import stat
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

MODULE = "tangram_start"
#: The module of a finder that finds nothing but setuptools.
SHIM = "_distutils_hack"
_CODE = ("import ", "import\t")
#: The module that a line of a test imports.
_IMPORTED = re.compile(r"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)
#: A library's module by whose name many projects have their tests.
PROJECTS_OWN = ("test",)
#: Variables that name what the loader, Python and what it loads at its start read.
READ_AT_START = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "PYTHONHOME", "GCONV_PATH", "LOCPATH"),
    *("OPENSSL_CONF", "OPENSSL_MODULES", "OPENSSL_ENGINES"),
)
#: What comes with pytest and its workers, and imports nothing of the project's by a statement.
PYTESTS = ("_pytest", "pytest", "pluggy", "iniconfig", "xdist", "execnet")
_IMPORT = opcode.opmap["IMPORT_NAME"]


class Places:
    """Which directories hold what the agent can have written.

    In a fresh sandbox those are the ``roots`` alone, without what is ``kept`` from coming over: nobody else has been
    there. Elsewhere what this process may write to is the agent's as well. ``brought`` are the files that came over
    into a fresh sandbox, each with whether it had none by that name; None if they are not known.
    What was written after ``since_ns`` may be a copy of one.
    """

    def __init__(
        self,
        fresh: bool,
        roots: Iterable[str],
        kept: Iterable[str],
        brought: dict[str, bool] | None = None,
        since_ns: int = 0,
    ) -> None:
        self.fresh, self._since_ns = fresh, since_ns
        self.roots = [os.path.realpath(root) for root in roots]
        self.kept = [os.path.realpath(place) for place in (*kept, *sys.path) if place]
        self._brought = None if brought is None else {_true_name(path): new for path, new in brought.items()}
        self._known: dict[str, bool] = {}

    def are_the_agents(self, path: str) -> bool:
        place = os.path.realpath(path)
        if _is_below(place, self.kept):
            return False
        return _is_below(place, self.roots) or (not self.fresh and is_writable(place))

    def is_brought(self, path: str) -> bool:
        """Return whether a file, or the archive in which it lies, is the agent's, as far as that is known."""
        path = os.path.abspath(path)
        if path not in self._known:
            self._known[path] = self.are_the_agents(path) if self._brought is None else self._new(path) is not None
        return self._known[path] or self._is_written(path)

    def _is_written(self, path: str) -> bool:
        try:
            return 0 < self._since_ns < os.stat(path).st_ctime_ns
        except OSError:
            return False

    def is_added(self, path: str) -> bool:
        """Return whether a file, or a directory, is in a fresh sandbox by the agent alone."""
        if self._brought is None:
            return self.fresh and self.is_brought(path)
        place = os.path.realpath(path) + "/"
        return bool(self._new(path)) or any(new for each, new in self._brought.items() if each.startswith(place))

    def _new(self, path: str) -> bool | None:
        """Return whether the file that came over and is this, or holds it, is a new one; None if none did."""
        place, brought = os.path.realpath(path), self._brought or {}
        while place not in brought and place != "/":
            place = os.path.dirname(place)
        return brought.get(place)


class ProjectGuard:
    """A finder before all others, which passes over what lies in the project."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._known: dict[str, bool] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = _found(self, name, path, target)
        if spec is not None and any(self._is_the_agents(str(place)) for place in _locations(spec)):
            raise ModuleNotFoundError(f"No module named {name!r} outside the project", name=name)
        return spec

    def _is_the_agents(self, place: str) -> bool:
        if os.path.islink(place):
            return self._places.are_the_agents(place)
        directory = os.path.dirname(place)
        if directory not in self._known:
            self._known[directory] = self._places.are_the_agents(directory)
        return self._known[directory]


class TrustedFirst:
    """A finder before all others: what is installed is not found in what the agent has added.

    Python's library and pytest find nothing else by their own import statements, and the given ``tests`` find the
    library first. The agent's own code finds what it would. ``shadowed`` is called with the name of a module that a
    test imports and of which the agent has another.
    """

    def __init__(
        self,
        places: Places,
        library: Iterable[str],
        installed: Iterable[str],
        tests: Iterable[str],
        shadowed: Callable[[str], None],
    ) -> None:
        self._places, self._tests, self._shadowed = places, frozenset(tests), shadowed
        self._path = [*library, *installed]
        self._library = tuple(os.path.join(place, "") for place in library)
        self._installed = tuple(os.path.join(place, "") for place in installed)
        self._roots = (*self._library, *self._installed)
        pytests = [place + name for place in self._installed for name in PYTESTS]
        self._ours = tuple(each + end for each in pytests for end in (os.sep, ".py"))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or "." in name or name in PROJECTS_OWN:
            return None
        place = _place_of(_found(self, name, None, target))
        if not place or place.startswith(self._roots):
            return None
        asking, literal = _importer()
        ours, given = self.is_ours(asking), asking in self._tests
        if not ours and not given and self._places.is_brought(asking):
            return None
        spec, added = _found(self, name, self._path, target), self._places.is_added(place)
        found = _place_of(spec)
        if found.startswith(self._roots):
            if ours or added or (given and self.is_librarys(found)):
                if not ours:
                    self._shadowed(name)
                return spec
        elif literal and (ours or (added and asking.startswith(self._installed))):
            raise ModuleNotFoundError(f"No module named {name!r} outside the project", name=name)
        return None

    def is_ours(self, place: str) -> bool:
        """Return whether a file is of Python's library or of pytest."""
        return place.startswith(self._ours) or self.is_librarys(place)

    def is_librarys(self, place: str) -> bool:
        return place.startswith(self._library) and not place.startswith(self._installed)


def _found(asking: object, name: str, path: Any, target: Any) -> Any:
    """Return what the finders find that come after the one that asks, None if nothing."""
    finders = list(sys.meta_path)
    for finder in finders[finders.index(asking) + 1 if asking in finders else 0 :]:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def _place_of(spec: Any) -> str:
    """Return the file of a module, or a directory if it is a package without code; empty if there is neither."""
    if spec is None or not spec.has_location:
        return str(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else ""
    return str(spec.origin)


def _locations(spec: Any) -> list[Any]:
    return [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location else [])]


class Installation:
    """What is installed, with what of the project it names, which waits for `admit`."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Run `site`; ``told`` are the arguments of `Places`."""
        self.places = Places(**told)
        self._waiting: list[tuple[str, str]] = []
        self._library = [place for place in sys.path if place]
        self._guard = ProjectGuard(self.places)
        self._admitted = False
        #: The finder that `admit` sets before all others.
        self.first: Any = None
        sys.meta_path.insert(0, self._guard)
        self._in_line = False
        site_module: Any = site
        add_directory = site_module.addsitedir

        def addsitedir(directory: str, *arguments: Any, **named: Any) -> Any:
            if not self._in_line:
                self.places.kept.append(os.path.realpath(directory))
            elif self.places.are_the_agents(directory):
                self._waiting.append(("code", f"import site; site.addsitedir({directory!r})"))
                return None
            return add_directory(directory, *arguments, **named)

        finders = [*sys.meta_path, *sys.path_hooks]
        site_module.addsitedir, site_module.addpackage = addsitedir, self._add_lines
        site_module.main()
        site_module.addsitedir = add_directory
        self._keep_out()
        more = [each for each in (*sys.meta_path, *sys.path_hooks) if each not in finders]
        #: Whether there are finders that may find the project, as projects in development mode have them.
        self._finds = any(getattr(type(each), "__module__", "") != SHIM for each in more)
        flags: Any = subprocess
        start_flags = flags._args_from_interpreter_flags
        # What multiprocessing starts begins as usual.
        flags._args_from_interpreter_flags = lambda: [flag for flag in start_flags() if flag != "-S"]
        self._installed = [place for place in sys.path if place not in self._library]
        #: Whether nothing of the agent's had a part in the start.
        program = (sys.executable, os.path.realpath(sys.executable), os.path.dirname(os.path.dirname(sys.executable)))
        self.clean = told["fresh"] or not (any(map(is_writable, program)) or any(map(_is_open, sys.path)))
        # And a working directory that holds the system, or the interpreter with its library.
        read = [*_read_at_start(), "/etc", os.path.join(sys.base_prefix, "lib")]
        self.clean = self.clean and not any(map(self.places.are_the_agents, read))

    def admit(self, tests: Iterable[str], shadowed: Callable[[str], None] = lambda _: None, ours: str = "") -> None:
        """Let in what waits, behind what is there; idempotent. ``tests`` and ``shadowed`` are `TrustedFirst`'s.

        ``ours`` is a directory whose modules count as the library's.
        """
        if self._admitted:
            return
        self._admitted = True
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self._guard]
        for kind, text in self._waiting:
            if kind == "place":
                sys.path.append(text)
            else:
                self._run(text)
        library = [*self._library, *filter(None, [ours])]
        self.first = TrustedFirst(self.places, library, self._installed, tests, shadowed)
        sys.meta_path.insert(0, self.first)

    def shadowed(self, tests: Iterable[str], paths: Iterable[str]) -> list[str]:
        """Return the modules of the library that a given test imports and that ``paths`` have, too."""
        roots = tuple(os.path.join(place, "") for place in self._library)
        found = []
        for test in tests:
            try:
                with open(test, encoding="utf-8", errors="replace") as file:
                    text = file.read()
            except OSError:
                continue
            for name in sorted(set(_IMPORTED.findall(text))):
                spec = _found(None, name, self._library, None)
                origin = "" if spec is None else str(spec.origin)
                if name in PROJECTS_OWN or not origin.startswith(roots) or origin.startswith(tuple(self._installed)):
                    continue
                places = [os.path.join(place, name) for place in (*paths, os.path.dirname(test))]
                files = [each for place in places for each in (place + ".py", os.path.join(place, "__init__.py"))]
                if any(os.path.exists(each) and os.path.realpath(each) != os.path.realpath(origin) for each in files):
                    found.append(name)
        return found

    @property
    def waits(self) -> bool:
        """Whether the installation names something of the project."""
        return not self._admitted and (bool(self._waiting) or self._finds)

    @property
    def waiting(self) -> list[str]:
        """Directories of the project that the installation names."""
        return [text for kind, text in self._waiting if kind == "place"]

    def _add_lines(self, directory: str, name: str, known: set[str], *_: Any) -> Any:
        """Take in the lines of a ``.pth`` file, as `site.addpackage` does, but for those that lead to the project."""
        path = os.path.join(directory, name)
        try:
            with open(_opened(path), encoding="utf-8-sig", errors="surrogateescape") as file:
                lines = file.read().splitlines()
        except OSError:
            return known
        for line in lines:
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith(_CODE):
                if not self._run(line):
                    self._waiting.append(("code", line))
                self._keep_out()
                continue
            place, key = site.makepath(directory, line.rstrip())
            if key in known or not os.path.exists(place):
                continue
            known.add(key)
            if self.places.are_the_agents(place):
                self._waiting.append(("place", place))
            else:
                sys.path.append(place)
        return known

    def _run(self, line: str) -> bool:
        """Run a line of a ``.pth`` file; return whether it came to its end."""
        self._in_line = True
        try:
            exec(line)
        except Exception as error:  # noqa: BLE001  # as `site` does
            if self._admitted:
                print(f"a line of a .pth file failed: {line[:200]}: {error}", file=sys.stderr)
            return False
        finally:
            self._in_line = False
        return True

    def _keep_out(self) -> None:
        """Have the project's directories wait that somebody has put on the path, and the guard stand first."""
        if self._admitted:
            return
        agents = [place for place in sys.path if place and self.places.are_the_agents(place)]
        self._waiting += [("place", place) for place in agents]
        sys.path[:] = [place for place in sys.path if place not in agents]
        sys.meta_path[:] = [self._guard, *(finder for finder in sys.meta_path if finder is not self._guard)]


def _read_at_start() -> list[str]:
    """Return what the environment names for the loader, Python and its libraries; nothing is the working directory."""
    named = {name: re.split("[: ]", os.environ[name]) for name in READ_AT_START if os.environ.get(name)}
    return [
        os.path.abspath(each) for name, found in named.items() for each in found if each or name == READ_AT_START[0]
    ]


def is_writable(place: str) -> bool:
    """Return whether this process may write there, or put something else in its place."""
    if os.access(place, os.W_OK):
        return True
    while place != os.path.dirname(place):
        above = os.path.dirname(place)
        if os.access(above, os.W_OK) and not _is_anothers(place, above):
            return True
        place = above
    return False


def _is_anothers(place: str, above: str) -> bool:
    """Return whether only its owner, who is another, may replace what lies in a directory that all may write to."""
    try:
        return bool(os.stat(above).st_mode & stat.S_ISVTX) and os.lstat(place).st_uid != os.geteuid()
    except OSError:
        return False


def _is_open(place: str) -> bool:
    """Return whether this process may write to a directory of an installation, or to what lies in it."""
    if is_writable(os.path.realpath(place)):
        return True
    try:
        return any(os.access(entry.path, os.W_OK) for entry in os.scandir(place))
    except OSError:
        return False


def _is_below(place: str, roots: Iterable[str]) -> bool:
    return any(place == root or place.startswith(root.rstrip("/") + "/") for root in roots)


def _opened(path: str) -> int:
    """Return a descriptor of a file; raises OSError for what would have its reader wait."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no file")
    return fd


def _true_name(path: str) -> str:
    """Return where a file or link lies, without links on the way."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), path.rpartition("/")[2])


def _importer() -> tuple[str, bool]:
    """Return the file whose code imports something, empty if there is none, and whether by a statement."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is None:
        return "", False
    return frame.f_code.co_filename, frame.f_code.co_code[frame.f_lasti] == _IMPORT


_installation: list[Installation] = []


def begin(told: dict[str, Any]) -> Installation:
    """Run `site` once, and return what is installed."""
    if not _installation:
        _installation.append(Installation(told))
    return _installation[0]


def installation() -> Installation:
    """Return what `begin` found."""
    return _installation[0]
