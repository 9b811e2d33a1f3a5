"""Archives: files on their way into a container and out of it, as tar."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import BinaryIO

from manager.errors import InvalidConfig, InvalidInput

COMPONENT = "sandbox.container"
#: Bytes that an archive of one file has beside the file.
ARCHIVE_SLACK_BYTES = 2 * tarfile.RECORDSIZE


def pack_file(name: str, file: BinaryIO, archive: BinaryIO, *, mode: int, uid: int) -> None:
    """Write an archive of one file that ``uid`` owns."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.uid, entry.gid = file.seek(0, io.SEEK_END), mode, uid, uid
        file.seek(0)
        tar.addfile(entry, file)


def unpacked_file(archive: bytes | bytearray, path: str) -> bytes:
    """Return the one file of an archive; raises InvalidInput, naming ``path``, if it is no regular file."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = next(iter(tar), None)
        file = None if member is None or not member.isreg() else tar.extractfile(member)
        if file is None:
            raise InvalidInput(f"{path!r} is no regular file", component=COMPONENT)
        return file.read()


def pack_tree(source: Path, target: str, archive: BinaryIO, limit_bytes: int) -> None:
    """Write a directory as it is, but with nothing writable in it, and without sockets and the like.

    Raises InvalidConfig if its files hold more than ``limit_bytes``.
    """
    left_bytes = limit_bytes

    def entry(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal left_bytes
        left_bytes -= info.size
        if left_bytes < 0:
            message = f"{source} holds more than {limit_bytes} bytes, too many to be copied into a container"
            raise InvalidConfig(f"{message} (sandbox.docker.copy_limit)", component=COMPONENT)
        info.mode &= 0o555
        return info if info.isreg() or info.isdir() or info.issym() or info.islnk() else None

    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(source, arcname=target.lstrip("/"), filter=entry)
