"""Room: descriptors are raised as far as they go, and what is short is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gateway.limits import Room

RAISED = """
import resource
from gateway.limits import raise_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
assert raise_descriptors() == 128
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)
"""


def test_descriptors_are_raised_to_what_the_machine_allows() -> None:
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_disk_below_its_bound_or_gone_is_named(tmp_path: Path) -> None:
    room = Room(tmp_path, free_min_bytes=1, connections_max=1)
    assert room.shortage() is None
    short = Room(tmp_path, free_min_bytes=2**60, connections_max=1).shortage()
    assert short is not None
    assert "server.free_min" in short and "make room" in short and "server.state_dir" in short
    tmp_path.rmdir()
    gone = room.shortage()
    assert gone is not None
    assert str(tmp_path) in gone
