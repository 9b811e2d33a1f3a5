"""The command line against a gateway: verbs, help, exit statuses and ids."""

from __future__ import annotations

import json
import re
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
from tangram.cli import exit_status, invocations, output
from tangram.cli.main import GROUP, VERBS, command_line
from tangram.cli.sessions import exec_
from tangram.errors import BY_CODE
from tangram.types import Reason
from tests.gateway.conftest import RunningGateway
from tests.tangram.cli.conftest import Served, Tangram


async def test_a_failed_invocation_tells_component_reason_and_its_last_lines(
    served: Served,
) -> None:
    status, _, err = await served("invoke", "echo", '{"reason": "handler_error", "log": "it went wrong\\n"}')
    assert status == 1
    assert "handler_error" in err and "it went wrong" in err
    status, _, _ = await served("invoke", "short", '{"held": true}')
    assert status == 124


async def test_a_followed_invocation_shows_its_log_and_then_its_result(
    served: Served,
) -> None:
    status, out, err = await served("invoke", "-f", "shell", '{"command": "echo one; echo two >&2; exit 3"}')
    assert status == 0, "a non-zero exit status is data"
    assert json.loads(out)["exit_code"] == 3
    assert "one\n" in err and "two\n" in err


async def test_work_left_running_is_found_shown_and_cancelled(served: Served, gateway: RunningGateway) -> None:
    status, out, _ = await served("invoke", "--async", "echo", '{"held": true}')
    id = out.strip()
    await gateway.executing(id)
    assert status == 0
    _, out, _ = await served("ps", "--state", "running", "--json")
    assert [each["id"] for each in json.loads(out)] == [id]
    _, out, _ = await served("ps")
    assert id in out and "running" in out
    assert (await served("cancel", id))[:2] == (0, f"{id} cancelled\n")
    status, out, _ = await served("show", id, "--wait", "1s")
    assert status == 130 and "cancelled" in out
    status, _, err = await served("cancel", id)
    assert status == 73 and "conflict" in err


@pytest.mark.parametrize("line", ["--help", "ps", "queue", "top --once", "functions show shell", "functions list"])
async def test_a_screen_fits_80_columns(
    served: Served, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    _, ps, _ = await served("ps")
    assert len(ps.rstrip()) <= 80, "the titles alone, where no terminal is"
    for number in range(2):
        await served("invoke", "--async", "shell", '{"command": "sleep 60"}', "--trajectory", f"a-rollout-{number:050}")
        await served("invoke", "--async", "echo", '{"held": true}', "--task", f"a-task-of-a-run-{number:040}")
    monkeypatch.setenv("COLUMNS", "80")
    for module in (output, invocations):
        monkeypatch.setattr(module, "is_terminal", lambda: True)
    status, out, _ = await served(*line.split())
    assert status == 0 and out.strip()
    assert [each for each in click.unstyle(out).splitlines() if len(each) > 80] == []


async def test_a_log_is_saved_as_it_was_written(served: Served, tmp_path: Path) -> None:
    _, out, _ = await served("invoke", "--json", "shell", '{"command": "printf \'\\\\033[1mone\\\\033[0m\\\\nend\'"}')
    id, kept = json.loads(out)["id"], tmp_path / "kept.log"
    assert (await served("logs", id, "-f", "--output", str(kept)))[0] == 0
    assert kept.read_text() == "\x1b[1mone\x1b[0m\nend"
    assert (await served("logs", id, "--json", "-o", str(kept)))[0] == 0
    assert "end" in [json.loads(line)["data"].splitlines()[-1] for line in kept.read_text().splitlines()]
    status, _, err = await served("logs", id, "-o", str(tmp_path / "none" / "kept.log"))
    assert status != 0 and "cannot be written" in err


async def test_logs_go_where_they_were_written_to(served: Served) -> None:
    _, out, _ = await served("invoke", "--json", "shell", '{"command": "echo one; echo two >&2"}')
    id = json.loads(out)["id"]
    status, out, err = await served("logs", "-f", id)
    assert (status, out) == (0, "one\n") and "two\n" in err
    _, out, _ = await served("logs", "--json", id)
    assert "one\n" in [json.loads(line)["data"] for line in out.splitlines()]


async def test_the_state_is_shown_to_people_and_to_programs(served: Served, gateway: RunningGateway) -> None:
    for words in (("functions", "list"), ("trajectories", "list"), ("tasks",), ("top",)):
        status, out, _ = await served(*words, "--json")
        assert status == 0 and json.loads(out) is not None
        status, out, err = await served(*words)
        assert status == 0, err
    _, out, _ = await served("functions", "show", "echo")
    assert out.startswith("tangram invoke echo '{}'\n") and "runtime: handler" in out
    assert f"-d '{{}}' \\\n  {gateway.http.base_url}/v1/functions/echo/invocations" in out.replace("/v1//v1", "/v1")
    _, out, _ = await served("functions", "show", "echo", "--schema")
    assert json.loads(out).keys() == {"input", "result"}
    assert (await served("functions", "show", "nobody"))[0] == 66
    assert (await served("trajectories", "end", "nobody"))[0] == 66


async def test_what_was_learned_of_a_function_is_shown_with_its_error(served: Served, gateway: RunningGateway) -> None:
    for _ in range(2):
        assert (await gateway.invoke({})).status_code == 200
    status, out, _ = await served("functions", "show", "echo")
    assert status == 0
    assert re.search(r"\(all\) +\S+ +\d+% +(-|0\.\d+) +- +2", out)
    exposition = (await gateway.http.get("/metrics")).text
    assert 'tangram_learned_t_ori_seconds{function="echo"}' in exposition
    assert 'tangram_learned_error_ratio{function="echo"}' in exposition
    assert 'tangram_learned_batch_marginal{function="echo"}' in exposition


async def test_a_configuration_is_compared_then_applied(
    served: Served, gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text("functions: {fresh: {runtime: exec}}")
    status, out, err = await served("diff", str(file))
    assert status == 0, err
    assert "+ fresh" in out and "- echo" not in out
    assert "- echo" in (await served("diff", "--prune", str(file)))[1]
    assert "fresh" not in [each.name for each in gateway.app.registry.all()]
    status, out, _ = await served("apply", "--json", str(file))
    assert json.loads(out)["applied"] is True
    assert {"fresh", "echo"} <= {each.name for each in gateway.app.registry.all()}
    monkeypatch.setenv("SAID", "from here")
    file.write_text("functions: {fresh: {runtime: exec, description: '${SAID} ${NOT_SAID:-and there}'}}")
    status, out, err = await served("apply", "--prune", "--json", str(file))
    assert json.loads(out)["applied"] is True
    assert "- echo" in err.splitlines()
    assert [each.description for each in gateway.app.registry.all()] == ["from here and there"]
    file.write_text("functions: {fresh: {runtime: exec, cost: {cpu: 60000}}}")
    status, _, err = await served("apply", str(file))
    assert status == 78 and "unsatisfiable" in err
    file.write_text("functions: {fresh: {runtim: exec}}")
    status, _, err = await served("apply", str(tmp_path / "new.yaml"))
    assert status == 78 and "runtim" in err


def test_what_cannot_be_sent_is_told_before_anything_is(tangram: Tangram, tmp_path: Path) -> None:
    status, _, err = tangram("apply", str(tmp_path), str(tmp_path / "gone.yaml"))
    assert status == 78
    assert "no tangram.yaml and no function.yaml" in err and "gone.yaml: no such file" in err
    assert tangram("apply", "--own", str(tmp_path))[0] == 2


async def test_dead_letters_are_listed_shown_sent_again_and_purged(served: Served, gateway: RunningGateway) -> None:
    ids = []
    for _ in range(2):
        answer = await gateway.invoke({"reason": "handler_error"}, function="retried", mode="async", wait="5s")
        ids.append(answer.json()["id"])
    _, out, _ = await served("dlq", "list")
    assert all(id in out for id in ids) and "handler_error" in out
    status, out, _ = await served("dlq", "show", ids[0])
    assert status == 0 and [line[:5] for line in out.splitlines()[:3]] == ["try 1", "try 2", "try 3"]
    status, out, _ = await served("dlq", "redrive", ids[0])
    again = out.strip()
    assert status == 0 and again not in ids
    assert (await served("show", again, "--wait", "5s"))[0] == 1
    assert (await served("dlq", "redrive", ids[0]))[0] == 73, "it has left the list"
    assert (await served("dlq", "purge", ids[1]))[1] == "1 purged\n"
    _, out, _ = await served("dlq", "purge", "--all", "--function", "retried", "--json")
    assert json.loads(out) == {"purged": 1}
    assert json.loads((await served("dlq", "list", "--json"))[1]) == []
    assert (await served("dlq", "purge"))[0] == 2


def test_a_gateway_that_is_not_there_is_said_plainly_and_waited_for_only_if_asked(
    tangram: Tangram, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status, _, err = tangram("ps", "--server", "http://127.0.0.1:9")
    assert status == 69 and "connection_failed" in err and "--retry-connrefused" in err
    assert "trying again" not in caplog.text
    monkeypatch.setattr("tangram.client.sync.pause", lambda seconds: None)
    monkeypatch.setattr("tangram.cli.options.OUTAGE_S", 0.1)
    status, _, err = tangram("ps", "--server", "http://127.0.0.1:9", "--retry-connrefused")
    assert status == 69 and "trying again" in caplog.text


@pytest.mark.parametrize(
    "words", [("nonsense",), ("invoke",), ("invoke", "f", "[1]"), ("invoke", "f", "{"), ("show", "x", "--wait", "3")]
)
def test_a_misused_verb_is_a_usage_error(tangram: Tangram, words: tuple[str, ...]) -> None:
    assert tangram(*words)[0] == 2


async def test_a_call_that_begins_a_trajectory_says_so_and_what_is_opened_outlives_the_command(
    served: Served, gateway: RunningGateway
) -> None:
    told = "trajectory t did not live"
    await served("trajectories", "open", "t", "--function", "echo")
    assert gateway.app.engine.trajectory("t") is not None and gateway.app.leases.left_s("t") is None
    assert told not in (await served("invoke", "echo", "{}", "--trajectory", "t"))[2]
    await served("trajectories", "end", "t")
    assert told in (await served("invoke", "echo", "{}", "--trajectory", "t"))[2]


async def test_a_trajectory_is_opened_with_what_it_chooses(served: Served, gateway: RunningGateway) -> None:
    status, out, _ = await served("trajectories", "open", "t", "--function", "shell")
    assert (status, out) == (0, "t is open\n")
    assert (await gateway.http.get("/v1/trajectories/t")).status_code == 200
    status, _, err = await served("trajectories", "open", "u", "-e", "A=1", "--workdir", "/box")
    assert status != 0 and "has no sandbox" in err
    assert (await served("trajectories", "open", "u", "-e", "A"))[0] == 2


async def test_a_mistyped_function_is_told_the_nearest(served: Served) -> None:
    status, _, err = await served("invoke", "ecko")
    assert status == 66 and "did you mean 'echo'?" in err


async def test_ps_tells_age_task_and_times_and_filters_by_reason(served: Served, gateway: RunningGateway) -> None:
    await gateway.invoke({}, headers={"X-Task": "swe"})
    await gateway.invoke({"reason": "handler_error"})
    _, out, _ = await served("ps")
    head, failed, good = out.splitlines()
    assert head.split()[:7] == ["ID", "FUNCTION", "TASK", "TRAJECTORY", "STATE", "REASON", "AGE"]
    assert "handler_error" in failed and "swe" in good.split()
    _, out, _ = await served("ps", "--reason", "handler_error", "--since", "10m", "--json")
    assert [each["reason"] for each in json.loads(out)] == ["handler_error"]


async def test_a_step_is_told_named_and_listed(served: Served) -> None:
    status, out, _ = await served("steps", "math", "7", "--expected", "3", "--json")
    assert (status, json.loads(out)[0]["expected"]) == (0, 3)
    await served("invoke", "echo", "{}", "--task", "math", "--step", "7")
    await served("trajectories", "open", "t", "--function", "echo", "--task", "math", "--step", "7")
    _, out, _ = await served("steps", "math")
    head, row = (line.split() for line in out.splitlines())
    assert head[:5] == ["STEP", "EXPECTED", "LIVING", "WAITING", "ENDED"]
    assert row[:5] == ["7", "3", "1", "0", "1"]
    assert (await served("steps", "math", "8"))[1].split() == ["STEP", *head[1:]], "nobody has told of it"
    status, _, err = await served("steps", "math", "--expected", "3")
    assert status != 0 and "name it" in err
    _, out, _ = await served("top", "--once", "--json")
    assert [each["step"] for each in json.loads(out)["steps"]] == [7]


async def made(gateway: RunningGateway, count: int) -> list[str]:
    for number in range(count):
        assert (await gateway.invoke({"n": number})).status_code == 200
    listed = (await gateway.http.get("/v1/invocations", params={"order": "oldest"})).json()["invocations"]
    return [each["id"] for each in listed]


async def test_the_number_alone_or_the_beginning_of_an_id_stands_for_it(
    served: Served, gateway: RunningGateway
) -> None:
    ids = await made(gateway, 17)
    short = ids[4].partition("-")[0].lstrip("0")
    for text in (ids[4], short, short.upper(), ids[4].partition("-")[0], ids[4][:16]):
        status, out, err = await served("show", text, "--json")
        assert status == 0 and ids[4] in out, err
    number = f"{int(ids[-1].partition('-')[0], 16):x}"
    assert number.startswith("1") and len(number) == 2
    status, out, _ = await served("show", number, "--json")
    assert ids[-1] in out


async def test_what_begins_several_is_refused_with_them_and_nothing_is_done(
    served: Served, gateway: RunningGateway
) -> None:
    ids = await made(gateway, 40)
    assert len({id[:10] for id in ids}) > 1
    status, _, err = await served("cancel", ids[0][:9])
    assert status == 65
    assert "begins several ids" in err and "(echo, succeeded)" in err and "write more of it" in err


async def test_what_begins_no_id_is_said_to(served: Served, gateway: RunningGateway) -> None:
    await made(gateway, 1)
    for text in ("fffff", "0000000ffff-1", "nonsense"):
        status, _, err = await served("cancel", text)
        assert status == 66, err
    status, _, err = await served("dlq", "show", "ffff")
    assert status == 66 and "begins with ffff" in err


async def test_every_verb_that_takes_an_id_takes_a_short_one(served: Served, gateway: RunningGateway) -> None:
    (id,) = await made(gateway, 1)
    for verb in [("show",), ("logs",), ("cancel",), ("dlq", "show"), ("dlq", "redrive"), ("dlq", "purge")]:
        status, _, err = await served(*verb, id.partition("-")[0].lstrip("0"))
        assert status == 0 or "conflict" in err, "it was found; whether the verb suits it is another matter"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--new", "t1", "ls", "-l", "--all"],
        ["t1", "--new", "ls", "-l", "--all"],
        ["t1", "--new", "--", "ls", "-l", "--all"],
        ["--new", "--", "t1", "ls", "-l", "--all"],
        ["--new", "--", "t1", "--", "ls", "-l", "--all"],
    ],
)
def test_options_stand_before_the_command_on_either_side_of_the_trajectory(arguments: list[str]) -> None:
    parsed = exec_.make_context("exec", list(arguments)).params
    assert (parsed["trajectory"], parsed["command"], parsed["new"]) == ("t1", ("ls", "-l", "--all"), True)


def test_what_follows_the_command_is_its_own() -> None:
    parsed = exec_.make_context("exec", ["t1", "-e", "A=1", "env", "--", "--new"]).params
    assert (parsed["command"], parsed["env"], parsed["new"]) == (("env", "--", "--new"), ("A=1",), False)


@pytest.mark.parametrize("arguments", [["t1", "--nwe", "ls"], ["t1"], ["t1", "--new"], []])
def test_what_is_no_option_and_no_command_is_refused(arguments: list[str]) -> None:
    with pytest.raises(click.UsageError):
        exec_.make_context("exec", list(arguments))


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
    # Of `shell` and `exec`, standard output is what the command says; `join` and `port-forward` serve, as `serve` does.
    silent = {"serve", "config-schema", "end", "export", "completion", "shell", "exec", "join", "port-forward", "help"}
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
