"""Sources of ours as Python starts them fastest: compiled here, for those Pythons in sandboxes that read this bytecode.

Every sandbox would compile them anew. Each travels with its source, for Pythons of other versions.
"""

from __future__ import annotations

import base64
import os
import py_compile
import tempfile
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from runtimes.sandbox.runner.protocol import RUNNER

#: A program whose last two lines hold its bytecode, and its source for a Python that does not read that. The comments
#: that they are cost it next to nothing; what ``__main__`` keeps of itself is the few lines before.
LOADER = """import binascii, marshal
from _frozen_importlib_external import MAGIC_NUMBER
def _code():
    with open(__file__, "rb") as file:
        _, compiled, source = file.read().rsplit(b"\\n#", 2)
    compiled = binascii.a2b_base64(compiled)
    if compiled.startswith(MAGIC_NUMBER):
        return marshal.loads(memoryview(compiled)[16:])
    import zlib
    return compile(zlib.decompress(binascii.a2b_base64(source)), "runner.py", "exec")
exec(_code())
"""


@cache
def compiled(source: str, name: str) -> bytes:
    """Return a source as a file of bytecode that Python takes without a look at the source's time."""
    with tempfile.TemporaryDirectory() as directory:
        written, made = Path(directory, f"{name}.py"), Path(directory, "made")
        written.write_text(source, encoding="utf-8")
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(
            str(written), str(made), dfile=written.name, doraise=True, optimize=0, invalidation_mode=unchecked
        )
        return made.read_bytes()


def packed_runner() -> bytes:
    """Return the runner as one file that starts fast."""
    source = RUNNER.read_bytes()
    parts = (compiled(source.decode("utf-8"), RUNNER.stem), zlib.compress(source, 9))
    return b"\n#".join([LOADER.encode("ascii"), *map(base64.b64encode, parts)])


def packed_beside(directory: Path) -> Path:
    """Return the packed runner as a file of a directory, written if it is not there as it must be."""
    place, packed = directory / RUNNER.name, packed_runner()
    with suppress(OSError):
        if place.read_bytes() == packed:
            return place
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{RUNNER.name}.{os.getpid()}.part"
    part.write_bytes(packed)
    part.chmod(0o644)
    part.replace(place)  # a sandbox that runs keeps the file that it has mounted
    return place
