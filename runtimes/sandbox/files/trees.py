"""Trees of files that were packed elsewhere, on this machine's disk to be mounted in sandboxes."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from runtimes.sandbox.files.archiver import Extraction


def unpack_tree(packed: Path, site: Path, limit_bytes: int) -> int:
    """Unpack a tar into a new directory, readable for every user and without links, and remove the tar.

    Return the bytes of its files. Raises `runtimes.sandbox.files.archiver.Refused`, TarError and OSError.
    """
    extraction = Extraction(str(site), limit_bytes)
    with tarfile.open(packed, mode="r:") as tar:
        extraction.all(tar)
    packed.unlink()
    for folder, folders, files in os.walk(site):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                path.unlink()  # no wheel holds one
            else:
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    site.chmod(0o755)
    site.parent.chmod(0o755)
    return limit_bytes - extraction.left
