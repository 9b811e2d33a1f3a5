"""The files of handlers that were registered over a door: kept below the state directory, by what is in them."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from manager.errors import CapacityExceeded, InvalidConfig, exhaustion

#: Bounds of one handler's files, and of how many handlers' files there may be before a restart removes the unused.
FILES_MAX, BYTES_MAX, KEPT_MAX = 200, 4 * 2**20, 1000
COMPONENT = "registry"
#: In the state directory: what was registered with its sources.
UPLOADS = "handlers"


class HandlerUploads:
    """Directories that never change once they are there; the name of each is a digest of its files."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def keep(self, sources: Mapping[str, str]) -> Path:
        """Return the directory of these files (relative path -> text); the same files have the same one.

        Raises InvalidConfig for paths and sizes that are not taken, CapacityExceeded, and StorageUnavailable.
        """
        files = _checked(sources)
        digest = hashlib.sha256()
        for name, data in files.items():
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
        directory = self.root / digest.hexdigest()[:32]
        if directory.is_dir():
            return directory
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            if sum(1 for _ in self.root.iterdir()) >= KEPT_MAX:
                raise CapacityExceeded(
                    f"{KEPT_MAX} versions of handlers were registered since the start: a restart removes the unused",
                    component=COMPONENT,
                )
            with tempfile.TemporaryDirectory(dir=self.root, prefix=".new-") as made:
                for name, data in files.items():
                    file = Path(made, "files", name)
                    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                    file.write_bytes(data)
                    file.chmod(0o644)
                Path(made, "files").rename(directory)
        except OSError as error:
            if directory.is_dir():
                return directory  # another request has made the same
            if short := exhaustion(error, COMPONENT):
                raise short from None
            raise
        return directory

    def prune(self, documents: Collection[bytes]) -> None:
        """Remove the directories that none of the applied documents names."""
        if not self.root.is_dir():
            return
        for each in self.root.iterdir():
            if not any(each.name.encode() in document for document in documents):
                shutil.rmtree(each, ignore_errors=True)


def _checked(sources: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files by path, in order; raises InvalidConfig."""
    if len(sources) > FILES_MAX:
        raise InvalidConfig(f"sources: {len(sources)} files, at most {FILES_MAX} are taken", component=COMPONENT)
    files: dict[str, bytes] = {}
    for name, text in sorted(sources.items()):
        path = PurePosixPath(name)
        plain = name and "\0" not in name and "\\" not in name and str(path) == name
        if not plain or path.is_absolute() or any(part in ("..", ".") for part in path.parts) or len(name) > 255:
            raise InvalidConfig(f"sources: {name[:256]!r} is no relative path of a file", component=COMPONENT)
        if not name.endswith((".py", ".json", ".txt", ".yaml", ".toml", ".csv")):
            raise InvalidConfig(
                f"sources: {name!r}: a handler's files are .py, .json, .txt, .yaml, .toml and .csv", component=COMPONENT
            )
        files[name] = text.encode("utf-8", "surrogatepass")
    size = sum(map(len, files.values()))
    if size > BYTES_MAX:
        raise InvalidConfig(f"sources: {size} bytes, at most {BYTES_MAX} are taken", component=COMPONENT)
    return files
