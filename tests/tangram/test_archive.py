"""No tar leads out of its directory, lends rights or takes without bound, whoever lays it out."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.attacks.trees import ATTACKS, USES, directory, entry, fields, generated, harm
from runtimes.sandbox.files import SOURCE
from tangram.archive import Extraction, Reader, Refused, opened_directory

#: Generated tars of a test, and of all that are marked slow.
FEW, MANY = 60, 2000


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ATTACKS)
def test_no_tar_does_harm(tmp_path: Path, name: str, use: str) -> None:
    assert harm(name, use, tmp_path / "x") == []


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_generated_tar_does_harm(tmp_path: Path, use: str, count: int) -> None:
    first = random.randrange(10**6)
    done = {seed: harm(str(seed), use, tmp_path / str(seed)) for seed in range(first, first + count)}
    assert {seed: each for seed, each in done.items() if each} == {}


@pytest.mark.parametrize("squeeze", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_damaged_tar_is_refused_and_nothing_else(squeeze: Callable[[bytes], bytes]) -> None:
    dice = random.Random(7)
    for seed in range(FEW):
        data = bytearray(squeeze(generated(seed)))
        for _ in range(dice.randrange(1, 5)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            for each in Reader(io.BytesIO(bytes(data[: dice.randrange(1, len(data))]))):
                assert each.size_bytes >= 0
        except Refused:
            pass


def test_a_tree_with_many_attributes_takes_no_memory(tmp_path: Path) -> None:
    value = "QUFB" * 4096
    data = b"".join(fields({"TANGRAM.xattr.user.a": value}, entry(f"f{n}")) for n in range(2000))
    with opened_directory(tmp_path) as root, Extraction(root) as tree:
        reader = Reader(io.BytesIO(data))
        tracemalloc.start()
        tree.all(reader)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(data) > 32 * 2**20 > 8 * 2**20 > peak


def test_names_of_directories_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.archive.NAMES_MAX_BYTES", 1000)
    data = b"".join(directory(f"d{n:03}") for n in range(500))
    with (
        opened_directory(tmp_path) as root,
        pytest.raises(Refused, match="paths of the directories"),
        Extraction(root) as tree,
    ):
        tree.all(Reader(io.BytesIO(data)))


def test_what_other_programs_pack_is_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / ("long" * 40)).write_bytes(b"x" * 3000)
    (source / "f").write_text("f")
    (source / "l").symlink_to("f")
    os.link(source / "f", source / "h")
    for form in ("gnu", "pax", "ustar", "v7"):
        os.utime(source / "f", (-1.5, -1.5) if form in ("gnu", "pax") else None)
        for squeezed in ([], ["-z"], ["-J"]):
            words = ["tar", "-c", *squeezed, f"--format={form}", "-C", str(source), "."]
            words += ["--exclude=d/*"] if form == "v7" else []
            done = subprocess.run(words, capture_output=True, check=form in ("gnu", "pax"))
            target = tmp_path / f"{form}{''.join(squeezed)}"
            target.mkdir()
            with opened_directory(target) as root, Extraction(root, into=True) as tree:
                tree.all(Reader(io.BytesIO(done.stdout)))
            assert (target / "f").read_text() == (target / "h").read_text() == "f"
            assert (target / "f").stat().st_nlink == 2 and (target / "l").readlink() == Path("f")
            if form in ("gnu", "pax"):
                assert (target / "d" / ("long" * 40)).read_bytes() == b"x" * 3000


def test_the_program_of_sandboxes_runs_alone(tmp_path: Path) -> None:
    words = [sys.executable, "-I", "-S", "-c", SOURCE, "put", str(tmp_path / "t"), "1000"]
    done = subprocess.run(words, input=entry("a/f", data=b"x"), capture_output=True, check=True)
    assert (done.stderr, (tmp_path / "t" / "a" / "f").read_bytes()) == (b"", b"x")
