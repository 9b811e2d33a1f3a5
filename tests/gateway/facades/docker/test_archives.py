"""What a sandbox sends of its files is not to be believed: its user can write to the pipe of the process that packs."""

from __future__ import annotations

import base64
import json
import tarfile
from collections.abc import AsyncIterator

import pytest

from gateway.facades.docker.api import NEVER, PathStat, _first, entry_stat, instant, stat_header
from manager.errors import InvalidInput


async def sent(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def header(kind: bytes, size: int) -> bytes:
    """Return an entry's header with a right checksum and any size, as base 256 has it."""
    entry = tarfile.TarInfo("x")
    entry.type = kind
    block = bytearray(entry.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = (size % (1 << 96)).to_bytes(12, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.REGTYPE])
async def test_an_entry_smaller_than_nothing_is_refused_and_holds_nobody_up(kind: bytes) -> None:
    with pytest.raises(InvalidInput, match="no archive"):
        await _first(sent(header(kind, -512), bytes(2048)))


async def test_what_is_no_header_is_refused_as_what_it_is() -> None:
    with pytest.raises(InvalidInput, match="no archive"):
        await _first(sent(b"x" * 1024))
    with pytest.raises(InvalidInput, match="no first entry"):
        await _first(sent(b"x" * 100))


async def test_the_first_entry_is_found_behind_headers_that_say_more_of_it() -> None:
    entry = tarfile.TarInfo("n" * 300)
    entry.size = 7
    whole = entry.tobuf(tarfile.PAX_FORMAT)
    head, found = await _first(sent(whole[:700], whole[700:]))
    assert (head, found.size) == (whole, 7)


def test_times_names_and_sizes_that_a_file_may_have_can_all_be_told() -> None:
    assert [instant(time_s) for time_s in (0.0, 1e18, -1e18, float("nan"))] == [NEVER] * 4
    assert instant(1.0) == "1970-01-01T00:00:01.000000Z"
    entry = tarfile.TarInfo("x")
    entry.type, entry.linkname = tarfile.SYMTYPE, "\udcff"
    for path in (entry_stat(entry, "\udcfe"), PathStat("x", 2**80, 0o100644, 1e18)):
        told = json.loads(base64.b64decode(stat_header(path)))
        assert told["size"] == path.size
