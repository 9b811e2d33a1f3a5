"""Real clients from the package registry, each kind in a virtual environment of its own, kept between runs."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The clients' scripts, and what each needs of the registry.
CLIENTS, REQUIREMENTS = ROOT / "tests" / "ecosystem" / "clients", ROOT / "tests" / "ecosystem" / "requirements"
CACHE = ROOT / ".cache" / "ecosystem"
#: Seconds for an environment, the first time, and for one client's whole run.
BUILD_S, RUN_S = 540, 240
#: What a client may see of its surroundings.
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "PIP_INDEX_URL", "PIP_CONFIG_FILE")


class ClientFailed(Exception):
    """A client could not be installed, or ended badly; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """A virtual environment in which a client is installed."""

    directory: Path

    async def run(self, script: str, *arguments: str, **variables: str) -> Any:
        """Run a client's script and return the JSON of its last line; raises ClientFailed.

        ``variables`` are added to its environment.
        """
        env = {name: os.environ[name] for name in KEPT if name in os.environ} | variables
        process = await asyncio.create_subprocess_exec(
            self.directory / "bin" / "python",
            CLIENTS / f"{script}.py",
            *arguments,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(RUN_S):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise ClientFailed(f"{script} was not done after {RUN_S} s") from None
        if process.returncode != 0:
            raise ClientFailed(f"{script} ended with {process.returncode}:\n{out.decode()}\n{err.decode()}")
        return json.loads(out.decode().splitlines()[-1])


def client_environment(name: str) -> ClientEnvironment:
    """Return the environment of ``NAME.txt``, made if it is not there; raises ClientFailed.

    A line ``--no-deps`` in it is for a second call of pip: packages whose parts are used alone. A first line
    ``# python 3.12`` asks for that Python where this one is another.
    """
    lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    python = _python(lines)
    digest = hashlib.sha256("\n".join([sys.version, *lines]).encode()).hexdigest()[:12]
    lines = [line for line in lines if not line.startswith("#")]
    directory = CACHE / f"{name}-{digest}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "made").exists():
            cut = lines.index("--no-deps") if "--no-deps" in lines else len(lines)
            try:
                _say([python, "-m", "venv", "--clear", str(directory)])
                pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
                for options, packages in ((pip, lines[:cut]), ([*pip, "--no-deps"], lines[cut + 1 :])):
                    if packages:
                        _say([*options, *packages])
            except (subprocess.SubprocessError, OSError) as error:
                raise ClientFailed(f"the client {name} could not be installed: {_why(error)}") from None
            (directory / "made").touch()
    return ClientEnvironment(directory)


def _python(lines: list[str]) -> str:
    """Return the interpreter that a client needs; raises ClientFailed where this machine has none."""
    wanted = lines[0].removeprefix("# python ") if lines[0].startswith("# python ") else ""
    if not wanted or sys.version.startswith(wanted):
        return sys.executable
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    found = [str(path) for root in roots for path in sorted(root.glob(f"{wanted}.*/bin/python"))]
    on_path = shutil.which(f"python{wanted}")
    for candidate in ([on_path] if on_path else []) + found:
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return candidate
    raise ClientFailed(f"there is no Python {wanted} on this machine")


def _why(error: Exception) -> str:
    """Return what pip said, less its warnings, or that it took too long."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it was not done after {BUILD_S} s"
    lines = str(getattr(error, "stderr", "") or error).splitlines()
    return "\n".join(line for line in lines if not line.startswith("WARNING"))[-800:]


def _say(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)
