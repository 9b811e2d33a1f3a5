"""Tars that mean harm, and the four ways in which one becomes files: what each leaves outside its directory."""

from __future__ import annotations

import io
import os
import random
import stat
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click

from manager.errors import CodedError
from runtimes.sandbox.files import unpack_tree
from runtimes.sandbox.snapshots import unpack
from tangram.adapters.provider import InfrastructureFailed, unpacked
from tangram.archive import Extraction, Reader, Refused, opened_directory
from tangram.cli.cp import Unpacking

LIMIT_BYTES = 2**20
#: How a tar is refused, or ends for want of something.
REFUSALS = (Refused, OSError, CodedError, click.ClickException, InfrastructureFailed)


def entry(name: str, type: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"", mode: int = 0o644) -> bytes:
    """Return an entry of a tar as the library writes it."""
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.size, header.mode = type, link, len(data), mode
    return header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512)


def directory(name: str, mode: int = 0o755) -> bytes:
    return entry(name, tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> bytes:
    return entry(name, tarfile.SYMTYPE, target)


def hard(name: str, target: str) -> bytes:
    return entry(name, tarfile.LNKTYPE, target)


def raw(name: bytes, type: bytes, size: bytes, data: bytes = b"") -> bytes:
    """Return a header whose size is what it says, and its content."""
    head = bytearray(512)
    head[: len(name)], head[100:107], head[156:157] = name, b"0000644", type
    head[124 : 124 + len(size)], head[257:265] = size, b"ustar\x0000"
    head[148:156] = b"%06o\0 " % (sum(head) + 8 * 32)
    return bytes(head) + data + bytes(-len(data) % 512)


def fields(values: Mapping[str, str], after: bytes) -> bytes:
    """Return an entry with an extended header."""
    lines = b""
    for key, value in values.items():
        text = f" {key}={value}\n".encode("utf-8", "surrogateescape")
        size = len(text) + 1
        while size != len(str(size)) + len(text):
            size = len(str(size)) + len(text)
        lines += str(size).encode() + text
    return raw(b"x", b"x", b"%011o" % len(lines), lines) + after


ROOT = directory(".")
SETUID = 0o4777


def corpus(outside: str) -> Mapping[str, Iterable[bytes]]:
    """Return attacks on a directory beside ``outside``, by what they try."""
    return {
        "up": [entry("../outside/planted", data=b"x")],
        "up_later": [entry("a/../../outside/planted", data=b"x")],
        "absolute": [entry(f"{outside}/planted", data=b"x")],
        "through_a_link": [link("l", outside), entry("l/planted", data=b"x")],
        "through_a_relative_link": [link("l", "../outside"), entry("l/planted", data=b"x")],
        "through_two_links": [
            directory("d"), link("d/l", "../.."), link("m", "d/l/outside"), entry("m/planted", data=b"x"),
        ],
        "onto_a_link": [link("l", f"{outside}/file"), entry("l", data=b"x")],
        "mode_through_a_link": [directory("d"), link("l", "d"), directory("l", SETUID), link("l", outside)],
        "mode_of_a_file_through_a_link": [
            directory("d"), link("l", "d"), directory("l", SETUID), link("l", f"{outside}/file"),
        ],
        "mode_of_a_link": [link("l", outside), directory("l", SETUID)],
        "directory_link_directory": [directory("d", SETUID), link("d", outside), directory("d", SETUID)],
        "hard_link_up": [hard("h", "../outside/file"), entry("h", data=b"x")],
        "hard_link_absolute": [hard("h", f"{outside}/file"), entry("h", data=b"x")],
        "hard_link_through_a_link": [link("l", outside), hard("h", "l/file"), entry("h", data=b"x")],
        "hard_link_of_a_link": [link("l", f"{outside}/file"), hard("h", "l"), entry("h", data=b"x", mode=SETUID)],
        "hard_link_of_itself": [hard("h", "h")],
        "what_is_there_leads_out": [entry("there/planted", data=b"x")],
        "what_is_there_is_another_name": [entry("mine", data=b"x", mode=0o777)],
        "setuid": [entry("f", data=b"x", mode=0o6755), directory("d", 0o7777)],
        "device": [entry("dev", tarfile.CHRTYPE)],
        "pipe": [entry("p", tarfile.FIFOTYPE), entry("p", data=b"x")],
        "negative_size": [raw(b"f", b"0", b"\xff" * 11 + b"\x00")],
        "negative_octal_size": [raw(b"f", b"0", b"-0000001000")],
        "negative_extended_size": [fields({"size": "-1024"}, entry("f"))],
        "endless_size": [raw(b"f", b"0", b"\x80" + b"\xff" * 11)],
        "size_is_no_number": [fields({"size": "nan"}, entry("f"))],
        "time_is_no_number": [fields({"mtime": "nan"}, entry("f"))],
        "endless_time": [fields({"mtime": "1e400"}, entry("f"))],
        "far_time": [fields({"mtime": "9" * 18}, entry("f"))],
        "huge_header": [raw(b"x", b"x", b"%011o" % 2**30)],
        "huge_name": [raw(b"L", b"L", b"%011o" % 2**30)],
        "headers_without_end": [raw(b"x", b"x", b"%011o" % 0)] * 5000,
        "broken_header": [raw(b"x", b"x", b"%011o" % 9, b"999 a=b\n\n"), entry("f")],
        "length_without_end": [raw(b"x", b"x", b"%011o" % 9, b"0 path=a\n"), entry("f")],
        "sparse": [raw(b"f", b"S", b"%011o" % 0)],
        "sparse_map": [fields({"GNU.sparse.major": "1", "GNU.sparse.realsize": "9" * 12}, entry("f"))],
        "null_in_a_name": [fields({"path": "a\0b"}, entry("f"))],
        "null_in_a_link": [fields({"linkpath": "a\0b"}, link("l", "x"))],
        "long_part": [fields({"path": "a" * 300}, entry("f"))],
        "long_path": [fields({"path": "a/" * 3000 + "f"}, entry("f"))],
        "long_link": [fields({"linkpath": "a" * 5000}, link("l", "x"))],
        "twice": [entry("f", data=b"x"), entry("f", data=b"y")],
        "attribute_of_another_kind": [fields({"TANGRAM.xattr.security.capability": "AA=="}, entry("f"))],
        "attribute_that_is_none": [fields({"TANGRAM.xattr.user.a": "\udcff"}, entry("f"))],
        "id_of_another": [fields({"uid": str(2**40)}, raw(b"f", b"0", b"%011o" % 0))],
        "cut_off": [entry("f", data=b"x" * 2000)[:700]],
        "damaged": [b"\xff" * 512],
        "no_gzip": [b"\x1f\x8b" + b"\xff" * 1000],
        "no_xz": [b"\xfd7zXZ\0" + b"\xff" * 1000],
    }  # fmt: skip


#: Their names.
ATTACKS = tuple(corpus("/outside"))
#: What a generated tar is made of; OUTSIDE stands for the path of what is outside.
NAMES = ("a", "b", "a/b", "a/b/c", "there", "there/x", "mine", "a/..", "../outside/y", "OUTSIDE/y", "./a", "d" * 300)
TARGETS = ("a", "..", "../..", "../outside", "OUTSIDE", "OUTSIDE/file", "a/b", "b/..", ".", "/", "mine", "")


def generated(seed: int, outside: str = "/outside") -> bytes:
    """Return a tar of a few entries that may undo each other, now and then with damaged bytes."""
    dice = random.Random(seed)

    def one_of(words: Sequence[str]) -> str:
        return dice.choice(words).replace("OUTSIDE", outside)

    makers: tuple[Callable[[], bytes], ...] = (
        lambda: directory(one_of(NAMES), dice.choice((0o700, 0o755, 0, SETUID, 0o7777))),
        lambda: link(one_of(NAMES), one_of(TARGETS)),
        lambda: hard(one_of(NAMES), one_of((*TARGETS, *NAMES))),
        lambda: entry(one_of(NAMES), data=b"x" * dice.choice((0, 3, 700)), mode=dice.choice((0o644, SETUID))),
        lambda: entry(one_of(NAMES), dice.choice((tarfile.FIFOTYPE, tarfile.CHRTYPE))),
    )
    data = bytearray(ROOT + b"".join(dice.choice(makers)() for _ in range(dice.randint(1, 9))))
    for _ in range(dice.choice((0, 0, 0, 1, 4))):
        place = dice.randrange(len(data))
        data[place] = dice.randrange(256)
        block = place - place % 512
        data[block + 148 : block + 156] = b" " * 8  # most damage is to be read, and not found by its sum
        data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
    return bytes(data)


def _layer(data: bytes, target: Path) -> None:
    packed = target.with_name("packed")
    packed.write_bytes(data)
    try:
        unpack_tree(packed, target / "layer", LIMIT_BYTES)
    finally:
        packed.unlink(missing_ok=True)


def _snapshot(data: bytes, target: Path) -> None:
    packed = target.with_name("packed")
    packed.write_bytes(data)
    try:
        with opened_directory(target) as root:
            unpack(packed, root, base=0, owners=False)
    finally:
        packed.unlink()


def _archive(data: bytes, target: Path) -> None:
    with (
        opened_directory(target) as root,
        Extraction(root, limit_bytes=LIMIT_BYTES, into=True, followed=str(target)) as tree,
    ):
        tree.all(Reader(io.BytesIO(data)))


#: What lays out a tar in a directory, and whether what it leaves is of the machine: without links that lead out.
USES: Mapping[str, tuple[Callable[[bytes, Path], None], bool]] = {
    "layer": (_layer, True),
    "snapshot": (_snapshot, False),
    "archive": (_archive, False),
    "copy": (lambda data, target: Unpacking(target, "tree").all(data), True),
    "download": (unpacked, True),
}


def tar_of(name: str, outside: str) -> bytes:
    """Return a tar of the corpus, or the generated one of a seed."""
    if name.isdigit():
        return generated(int(name), outside)
    return b"".join([ROOT, *corpus(outside)[name]])


def harm(name: str, use: str, place: Path) -> list[str]:
    """Lay out a tar in a new directory below ``place``; return what it did that it may not, empty if nothing."""
    target, outside = place / "target", place / "outside"
    for made in (target, outside):
        made.mkdir(parents=True)
    (outside / "file").write_text("of the host")
    if use in ("archive", "copy", "download"):  # which go into what is there
        (target / "there").symlink_to(outside)
        (target / "mine").symlink_to(outside / "file")
    before, done, of_machine = _state(place), [], USES[use][1]
    try:
        USES[use][0](tar_of(name, str(outside)), target)
    except REFUSALS:
        pass
    except Exception as error:  # noqa: BLE001 - whatever else is raised is a fault
        done.append(f"breaks: {error!r}")
    after = _state(place)
    done += [f"changes {key}" for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    for folder, folders, files in os.walk(target):
        for left in (Path(folder, each) for each in (*folders, *files)):
            mode = left.lstat().st_mode
            if left in (target / "there", target / "mine"):
                continue
            if of_machine and stat.S_ISLNK(mode) and not Path(os.path.realpath(left)).is_relative_to(target):
                done.append(f"leaves a link out, {left.name}")
            if not stat.S_ISLNK(mode) and use != "archive" and mode & (stat.S_ISUID | stat.S_ISGID):
                done.append(f"lends rights by {left.name}")
    return done


def play(place: Path, count: int, first: int) -> dict[str, list[str]]:
    """Lay out every tar of the corpus and ``count`` generated ones in each way; return what each did."""
    names = (*ATTACKS, *map(str, range(first, first + count)))
    return {f"{name}-{use}": harm(name, use, place / f"{name}-{use}") for name in names for use in USES}


def _state(place: Path) -> dict[str, tuple[object, ...]]:
    """Return what is below a directory but in its target."""
    found: dict[str, tuple[object, ...]] = {}
    for path in place.rglob("*"):
        if not path.is_relative_to(place / "target"):
            info = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
            found[str(path.relative_to(place))] = (info.st_mode, info.st_uid, info.st_nlink, info.st_size, content)
    return found
