"""README's hello world and the quick start run as typed, in an empty directory, and print what they show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT

#: Seconds for a page, gateway and sandboxes included.
PAGE_S = 300.0
#: A network of its own has the gateway's usual ports free; its loopback is brought up without iproute2.
LOOPBACK_UP = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1))"
_BLOCK = re.compile(
    r"(?:^`(?P<file>[\w./]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
SERVING = "tangram serve"


class PlayedPage:
    """The program that a page's blocks are together, and what it is to print."""

    def __init__(self, text: str) -> None:
        # SIGINT ends the sandboxes, too; SIGTERM would keep them for a next gateway.
        # SIGINT ends the sandboxes too, and reaches what is begun in the background only under `set -m`.
        self.lines = ["set -em", "trap 'kill -INT %1 2>/dev/null && wait %1 || true' EXIT"]
        #: What each shown output follows: the number of the block before it.
        self.shown: list[tuple[int, str]] = []
        blocks = list(_BLOCK.finditer(text))
        for number, block in enumerate(blocks):
            language, content = block["language"], block["text"]
            if language == "text":
                self.shown.append((number - 1, content))
            elif block["file"]:
                self._write(block["file"], content)
            else:
                self.lines += self._typed(language, content)
            self.lines.append(f"echo '=== {number}'")

    def _typed(self, language: str, text: str) -> Iterator[str]:
        if language == "python":
            yield from ("python - <<'END_OF_PROGRAM'", text + "END_OF_PROGRAM")
            return
        for line in text.splitlines():
            command = line.partition("  #")[0].rstrip()
            if command.startswith(("pip install", "make ")):  # what the environment of this test has already
                continue
            if command == SERVING:  # a second terminal goes on while it serves
                yield f"{SERVING} > gateway.log 2>&1 &"
                yield "timeout 120 sh -c 'until tangram queue >/dev/null 2>&1; do sleep 0.2; done'"
            else:
                yield command

    def _write(self, file: str, content: str) -> None:
        self.lines += [f"mkdir -p {Path(file).parent}", f"cat > {file} <<'END_OF_FILE'", content + "END_OF_FILE"]

    def play(self, directory: Path) -> list[str]:
        """Run it in an empty directory; return what each of its blocks printed."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(directory),
            "COLUMNS": "80",
        }
        script = directory / "page.sh"
        script.write_text("\n".join([f'"{sys.executable}" -c "{LOOPBACK_UP}"', *self.lines]) + "\n")
        work = directory / "empty"
        work.mkdir()
        command = ["unshare", "--net", "bash", str(script)]
        ran = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=PAGE_S)
        logs = "".join(each.read_text() for each in work.glob("*/gateway.log"))
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}\n{logs}"
        return re.split(r"^=== \d+\n", ran.stdout, flags=re.MULTILINE)


@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root has a network of its own")
@pytest.mark.parametrize("page", ["README.md", "docs/guide/quick-start.md"])
def test_every_block_runs_as_typed_and_prints_what_is_shown(page: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    played = PlayedPage((ROOT / page).read_text(encoding="utf-8"))
    assert len(played.shown) >= 2
    printed = played.play(tmp_path)
    for number, shown in played.shown:
        assert shown in printed[number], f"block {number} of {page} prints {printed[number]!r}"
