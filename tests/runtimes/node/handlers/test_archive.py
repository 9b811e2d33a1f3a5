"""What of a handler's directory travels, and that its digest is that of the files alone."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from manager.errors import InvalidConfig
from runtimes.node.protocol import HandlerArchive, HandlerArchives, digest_of
from runtimes.sandbox.files import unpack_tree
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES, SOURCES_MAX


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        file = directory / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        (file if file.suffix else file.with_suffix(".py")).write_text(text)
    return directory


def names(archive: HandlerArchive) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive.data)) as tar:
        return tar.getnames()


async def test_the_digest_is_that_of_names_bytes_and_modes_and_of_nothing_else(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, handler="x = 1", pkg__util="y = 2") for name in ("a", "b"))
    os.utime(other / "handler.py", (1, 1))
    archives = HandlerArchives()
    first = await archives.of(one)
    assert (await archives.of(other)).digest == first.digest == digest_of(one)
    digests = {first.digest}
    for change in (
        lambda: (other / "handler.py").write_text("x = 2"),
        lambda: (other / "handler.py").chmod(0o755),
        lambda: (other / "pkg" / "util.py").rename(other / "pkg" / "tool.py"),
    ):
        change()
        digests.add((await archives.of(other)).digest)
    assert len(digests) == 4


async def test_what_was_unpacked_has_the_digest_of_what_was_packed(tmp_path: Path) -> None:
    source = write(tmp_path / "source", handler="x = 1", deep__er__util="y = 2")
    (source / "tool").write_bytes(b"\x00\xff")
    (source / "tool").chmod(0o700)
    (source / "words.txt").write_text("a b")
    (source / "tool").chmod(0o755)
    archive = await HandlerArchives().of(source)
    packed = tmp_path / "packed"
    packed.write_bytes(archive.data)
    unpack_tree(packed, tmp_path / "there" / "files", SOURCES_LIMIT_BYTES)
    assert digest_of(tmp_path / "there" / "files") == archive.digest
    assert os.access(tmp_path / "there" / "files" / "tool", os.X_OK)


async def test_what_is_hidden_private_elsewhere_or_compiled_stays(tmp_path: Path) -> None:
    source = write(tmp_path / "source", handler="", data__words="", private__secret="", state__log="")
    for name in ("words.txt", "key.pem", "state/log.txt", "private/notes.txt", ".env", ".git/config", "pkg/a.txt"):
        file = source / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "handler.pyc").write_text("")
    (source / "__pycache__" / "odd.py").write_text("")
    (source / "key.pem").chmod(0o600)
    (source / "handler.py").chmod(0o600)
    (source / "private").chmod(0o700)
    (tmp_path / "outside.txt").write_text("")
    (source / "out.txt").symlink_to(tmp_path / "outside.txt")
    (source / "in.txt").symlink_to("words.txt")
    (source / "loop.txt").symlink_to("loop.txt")
    archive = await HandlerArchives([source / "state"]).of(source)
    assert names(archive) == ["data/words.py", "handler.py", "in.txt", "pkg/a.txt", "private/secret.py", "words.txt"]


async def test_no_link_takes_along_what_would_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "source", handler="", private__tool="", state__log="")
    stays = ("state/secret.txt", ".env", ".git/config", "private/notes.txt", "key.pem", "__pycache__/handler.pyc")
    for number, name in enumerate(stays):
        file = source / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("secret")
        (source / f"link{number}.txt").symlink_to(name)
        (source / f"link{number}.py").symlink_to(name)
    (source / "key.pem").chmod(0o600)
    (source / "private").chmod(0o700)
    (source / "tool.py").symlink_to("private/tool.py")
    (source / "tool.txt").symlink_to("private/tool.py")
    archive = await HandlerArchives([source / "state"]).of(source)
    assert names(archive) == ["handler.py", "private/tool.py", "tool.py"]


async def test_a_directory_within_one_that_never_travels_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "state" / "deep", handler="")
    (tmp_path / "link").symlink_to(source)
    for directory in (source, tmp_path / "link"):
        for excluded in (source, tmp_path / "state"):
            with pytest.raises(InvalidConfig, match="elsewhere"):
                await HandlerArchives([excluded]).of(directory)


async def test_a_handler_that_the_gateway_was_sent_travels_from_where_it_is_kept(tmp_path: Path) -> None:
    source = write(tmp_path / "state" / "handlers" / "0123", handler="")
    (source / "link.py").symlink_to("handler.py")
    archives = HandlerArchives([tmp_path / "state"], tmp_path / "state" / "handlers")
    assert names(await archives.of(source)) == ["handler.py", "link.py"]
    with pytest.raises(InvalidConfig, match="elsewhere"):
        await archives.of(tmp_path / "state" / "handlers")


async def test_a_changed_file_is_seen_and_an_unchanged_directory_packed_once(tmp_path: Path) -> None:
    source, archives = write(tmp_path / "source", handler="x = 1"), HandlerArchives()
    first = await archives.of(source)
    assert (await archives.of(source)) is first
    (source / "words.txt").write_text("new")
    assert (await archives.of(source)).digest != first.digest


async def test_too_many_files_and_too_many_bytes_are_refused_with_the_remedy(tmp_path: Path) -> None:
    many, large = write(tmp_path / "many", handler=""), write(tmp_path / "large", handler="")
    for number in range(SOURCES_MAX):
        (many / f"{number}.txt").touch()
    with (large / "weights.bin").open("wb") as file:
        file.truncate(SOURCES_LIMIT_BYTES + 1)
    for source in (many, large):
        with pytest.raises(InvalidConfig, match="a directory of its own"):
            await HandlerArchives().of(source)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        await HandlerArchives().of(tmp_path / "none")
