"""The command as a whole: its verbs, those that a server adds, what it needs, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import get_args

import click
import pytest

from gateway.cli import main as server
from gateway.errors import ERROR_STATUSES
from tangram.cli import exit_status
from tangram.cli.main import GROUP, VERBS, command_line
from tangram.errors import BY_CODE
from tangram.types import Reason
from tests.tangram.cli.conftest import Tangram

ROOT = Path(__file__).parents[3]
ALL = {**VERBS, **server.VERBS}
LINE = command_line(server.VERBS)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize("verb", ALL)
def test_every_verb_explains_itself(tangram: Tangram, verb: str) -> None:
    status, out, _ = tangram(verb, "--help")
    assert status == 0
    assert out.startswith(f"Usage: tangram {verb}")


def commands_of(command: click.Command) -> list[click.Command]:
    """Return the verb, or the verbs below it."""
    if not isinstance(command, click.Group):
        return [command]
    return [each for below in command.commands.values() for each in commands_of(below)]


@pytest.mark.parametrize("verb", ALL)
def test_every_verb_speaks_json(verb: str) -> None:
    # Of `shell` and `exec`, standard output is what the command says; `join` serves, as `serve` does.
    silent = {"serve", "config-schema", "end", "export", "completion", "shell", "exec", "join", "help"}
    command = LINE.get_command(click.Context(LINE), verb)
    assert command is not None
    assert not [
        each.name
        for each in commands_of(command)
        if each.name not in silent and "--json" not in [o for p in each.params for o in p.opts]
    ]


def test_help_loads_no_verb() -> None:
    ran = run(
        "import sys\n"
        "from gateway.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    loaded = set(ran.stderr.split())
    assert "tangram.cli.main" in loaded
    assert not loaded & {verb.place.partition(":")[0] for verb in ALL.values()}


def test_an_installed_server_adds_its_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    points = [EntryPoint(name, value, GROUP) for name, value in declared.items()]
    monkeypatch.setattr("tangram.cli.main.entry_points", lambda group: points if group == GROUP else [])
    alone = command_line()
    assert alone.list_commands(click.Context(alone)) == list(ALL)
    assert alone.get_command(click.Context(alone), "validate") is not None


def test_without_a_server_there_are_the_verbs_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.cli.main.entry_points", lambda group: [])
    alone = command_line()
    assert alone.list_commands(click.Context(alone)) == list(VERBS)
    assert alone.get_command(click.Context(alone), "serve") is None


@pytest.mark.parametrize("library", ["click", "rich"])
def test_a_missing_library_is_named_with_its_remedy(library: str) -> None:
    program = f"import sys; sys.modules[{library!r}] = None; sys.argv[1:] = ['ps', '--help']"
    ran = run(f"{program}; import tangram.cli; tangram.cli.run()")
    assert ran.returncode == 1
    assert library in ran.stderr and "tangram-client[cli]" in ran.stderr and "Traceback" not in ran.stderr


def test_every_error_and_every_reason_has_its_exit_status() -> None:
    assert {*ERROR_STATUSES, *BY_CODE} <= exit_status.BY_CODE.keys()
    assert set(get_args(Reason)) == exit_status.BY_REASON.keys()
    assert exit_status.of_reason(None) == 0
    assert exit_status.of_code("of_a_newer_server") == exit_status.of_reason("of_a_newer_server") == 70


def test_a_reader_that_has_seen_enough_ends_it_in_silence() -> None:
    program = "import tangram.cli, sys; sys.argv[1:] = ['--help']; tangram.cli.run()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, cwd=ROOT) as ran:
        assert ran.stdout is not None and ran.stderr is not None
        ran.stdout.close()
        assert ran.stderr.read() == b""
        assert ran.wait(60) == 1


def test_a_mistyped_verb_or_option_is_told_the_nearest(tangram: Tangram) -> None:
    for words, meant in ((("invok",), "'invoke'"), (("ps", "--stat", "x"), "--state"), (("dlq", "lst"), "list")):
        status, _, err = tangram(*words)
        assert status == 2 and meant in err
    status, _, err = tangram("qqqqqq")
    assert status == 2 and "mean" not in err


def test_global_options_may_stand_before_the_verb_or_behind_it(tangram: Tangram) -> None:
    for words in (("--server", "gw:1/x", "ps"), ("ps", "--server", "gw:1/x"), ("--server", "gw:1/x", "dlq", "list")):
        status, _, err = tangram(*words)
        assert status == 78 and "gw:1/x" in err, words
    status, _, err = tangram("--server", "gw:1/x", "ps", "--server", "gw:2/y")
    assert "gw:2/y" in err, "the nearer one"


def test_a_global_option_that_a_verb_does_not_take_is_refused(tangram: Tangram) -> None:
    status, _, err = tangram("--server", "http://x", "validate")
    assert status == 2 and "validate takes no --server" in err
    status, out, _ = tangram("--json", "config-schema")
    assert status == 2 and "takes no --json" in json.loads(out)["error"]["message"]


def test_errors_are_json_where_it_was_asked_for(tangram: Tangram) -> None:
    for words, status, code in (
        (("ps", "--json", "--server", "http://127.0.0.1:9"), 69, "connection_failed"),
        (("--json", "ps", "--server", "http://127.0.0.1:9"), 69, "connection_failed"),
        (("ps", "--json", "--limit", "x"), 2, "usage"),
        (("show", "--json"), 2, "usage"),
    ):
        ended, out, err = tangram(*words)
        error = json.loads(out)["error"]
        assert (ended, error["code"], err) == (status, code, ""), words
        assert error["component"] and error["message"]
    assert tangram("exec", "t", "jq", "--json", "--server", "http://127.0.0.1:9")[1] == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(tangram: Tangram, shell: str) -> None:
    status, out, _ = tangram("completion", shell)
    assert status == 0 and "_TANGRAM_COMPLETE" in out and f"{shell}_complete" in out
