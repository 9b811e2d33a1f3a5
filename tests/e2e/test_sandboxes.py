"""What a user of sandboxes relies on, over real sockets and real sandboxes of both kinds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tangram import CapacityExceededError, Client, InvalidInputError, NotFoundError, Trajectory, UnsupportedError
from tangram.adapters import CommandTimedOut, InfrastructureFailed, SandboxProvider
from tangram.client.requests import Bearer
from tests.e2e.gateway import GatewayProcess, document

SUITE = """
import pytest


def test_works():
    assert add(2, 2) == 4


@pytest.mark.parametrize("word", ["a b", "[x]", "é::y"])
def test_odd_names(word):
    assert word


def add(a, b):
    return a - b
"""


@pytest.fixture
def trajectory(client: Client) -> Iterator[Trajectory]:
    with client.trajectory(f"e2e-{uuid.uuid4().hex[:8]}", function="shell") as opened:
        yield opened


@pytest.mark.promise("A trajectory has one sandbox, and its files survive from action to action.")
def test_files_survive_from_action_to_action(trajectory: Trajectory) -> None:
    assert trajectory.exec("echo kept > note.txt").result["exit_code"] == 0
    assert trajectory.exec("cat note.txt").result["stdout"] == "kept\n"
    assert trajectory.download("note.txt") == b"kept\n"


#: Serves the files of its directory.
SERVER = "setsid python3 -m http.server 8000 --bind 127.0.0.1 >log 2>&1 </dev/null &"


@pytest.mark.promise(
    "A server in a sandbox of any kind is reached by its URL, and lives on after a command was killed."
)
def test_a_server_is_reached(trajectory: Trajectory) -> None:
    with trajectory.port(8000) as early, pytest.raises(CapacityExceededError, match="connection refused"):
        early.wait_ready(timeout_s=0.5)
    trajectory.upload("note.txt", "served")
    assert trajectory.exec(SERVER).result["exit_code"] == 0
    with trajectory.port(8000) as port:
        port.wait_ready("/note.txt")
        assert httpx.get(port.url + "/note.txt").text == "served"
        assert trajectory.exec("sleep 60", timeout_s=1).state == "timed_out"
        assert httpx.get(port.url + "/note.txt").text == "served"
    assert httpx.get(port.url + "/note.txt").status_code == 404
    with pytest.raises(NotFoundError):
        port.wait_ready()


@pytest.mark.promise("A server in a sandbox, and the right to reach it, outlive a gateway that is killed.")
def test_a_server_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    process = GatewayProcess(tmp_path, document("process", tmp_path / "state"))
    process.start()
    try:
        with Client(process.url, lease_s=None) as client:
            trajectory = client.trajectory("t", function="shell")
            before = trajectory.open().port(8000)
            with pytest.raises(CapacityExceededError):  # what connects runs before the server does
                before.wait_ready(timeout_s=0.5)
            assert trajectory.exec("echo served > note.txt; " + SERVER).result["exit_code"] == 0
            before.wait_ready()
        process.kill()
        process.start()
        with Client(process.url, lease_s=None) as client:
            trajectory = client.trajectory("t", function="shell")
            here = trajectory.port(8000).url.rpartition("/")[0]
            url = f"{here}/{before.url.rpartition('/')[2]}/note.txt"  # the listener is at another port now
            assert httpx.get(url).text == "served\n"
            trajectory.close()
            assert httpx.get(url).status_code == 404
    finally:
        process.stop()


@pytest.mark.slow
def test_a_file_larger_than_its_sandbox_memory_comes_out_and_the_gateway_holds_little_of_it(
    gateway: GatewayProcess, client: Client
) -> None:
    size = 200 * 2**20
    with client.trajectory(f"large-{uuid.uuid4().hex[:8]}", function="small") as trajectory:
        assert trajectory.exec(f"head -c {size} /dev/zero > large").result["exit_code"] == 0
        before_kib = peak_kib(gateway.pid)
        assert len(trajectory.download("large")) == size
        assert peak_kib(gateway.pid) - before_kib < 32 * 1024
        assert trajectory.exec("echo well").result["stdout"] == "well\n"


def peak_kib(pid: int) -> int:
    """The most memory that a process ever held."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0])


def test_the_nine_verbs_of_an_adapter_work_in_a_real_sandbox(client: Client, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "in" / "link").symlink_to("calc.py")
    suite = "from calc import add\n\n\ndef test_it():\n    assert add(2, 2) == 4\n"
    with SandboxProvider(client=client, grader="tests", durable=True) as provider:
        box = provider.open()
        provider.upload_tree(box, tmp_path / "in", ".")
        assert provider.run(box, ["readlink", "link"]).output == "calc.py\n"
        assert provider.run(box, "kill -9 $$").exit_code == 137
        merged = provider.run(box, "cat; echo b >&2; printf '\\377'", stdin=b"a\n", merge=True)
        assert (merged.stdout, merged.stderr, merged.exit_code) == (b"a\nb\n\xff", b"", 0)
        with pytest.raises(CommandTimedOut) as late:
            provider.run(box, "echo begun; sleep 1000", timeout_s=1.0)
        assert late.value.stdout == b"begun\n"
        provider.write(box, "deep/note", "kept", mode=0o640)
        assert provider.read(box, "deep/note") == b"kept"
        for path, kind in (("nowhere", FileNotFoundError), ("deep", IsADirectoryError)):
            with pytest.raises(kind):
                provider.read(box, path)
        provider.download_tree(box, ".", tmp_path / "out")
        assert (tmp_path / "out" / "deep" / "note").stat().st_mode & 0o777 == 0o640
        assert (tmp_path / "out" / "link").is_symlink()
        assert provider.grade({"tests": {"test_calc.py": suite}}, sandbox=box).score() == 1.0
        assert provider.invoke("double", {"value": 2}, sandbox=box)["trajectory"] == box
        with pytest.raises(InfrastructureFailed, match="cannot be computed"):
            provider.invoke("broken", {})
    assert box not in {each.trajectory for each in client.trajectories()}


@pytest.mark.promise("A non-zero exit status is data.")
def test_a_non_zero_exit_is_data(trajectory: Trajectory) -> None:
    ended = trajectory.exec("echo out; echo err >&2; exit 7")
    assert ended.state == "succeeded"
    assert (ended.result["exit_code"], ended.result["stdout"], ended.result["stderr"]) == (7, "out\n", "err\n")


@pytest.mark.promise("ACT is queue + overhead + execution, from acceptance to the end, over all tries and restarts.")
def test_the_three_times_are_told_and_cores_are_granted(trajectory: Trajectory) -> None:
    ended = trajectory.exec("true")
    assert ended.units == {"cpu": 1}
    assert ended.execution_s > 0
    assert ended.overhead_s >= 0


@pytest.mark.promise("The actions of a trajectory run in order, one at a time.")
def test_actions_of_one_trajectory_run_in_order_one_at_a_time(client: Client, trajectory: Trajectory) -> None:
    command = "echo in-{0} >> order; echo out-{0} >> order"
    accepted = [
        client.submit("shell", {"command": command.format(number)}, trajectory=trajectory.id) for number in range(8)
    ]
    for each in accepted:
        assert client.wait(each.id).state == "succeeded"
    expected = [f"{what}-{number}" for number in range(8) for what in ("in", "out")]
    assert trajectory.download("order").decode().split() == expected


@pytest.mark.promise("Between actions background processes stand still, run or end, as configured.")
def test_background_processes_live_by_policy(client: Client) -> None:
    name = f"daemon-{uuid.uuid4().hex[:8]}"
    with client.trajectory(name, function="daemon") as sandbox:
        sandbox.exec("mkfifo gate; (read word < gate; echo $word > heard) > /dev/null 2>&1 &")
        assert (
            sandbox.exec("echo hello > gate; while [ ! -s heard ]; do :; done; cat heard").result["stdout"] == "hello\n"
        )


@pytest.mark.promise("The files of the host are not seen, and no path leads out.")
def test_paths_cannot_leave_the_sandbox(gateway: GatewayProcess, trajectory: Trajectory) -> None:
    trajectory.exec("ln -s /etc/passwd leak; ln -s / root")
    with httpx.Client(base_url=gateway.url, auth=Bearer(None)) as raw:
        for path in ("..%2f..%2fetc%2fshadow", "workspace/%2e%2e/%2e%2e/etc/shadow"):
            answer = raw.get(f"/v1/trajectories/{trajectory.id}/files/{path}")
            assert answer.status_code in (403, 404, 409, 422), answer.text
    # A link is followed inside the sandbox or not at all: never to the host's file.
    try:
        leaked = trajectory.download("leak")
    except Exception as error:  # noqa: BLE001 - any typed refusal will do
        assert getattr(error, "code", "") in ("invalid_input", "not_found"), error
    else:
        assert leaked == trajectory.exec("cat /etc/passwd").result["stdout"].encode()


@pytest.mark.promise("`timeout` bounds the execution, and kills every process of it.")
def test_a_timeout_kills_and_says_so(client: Client, trajectory: Trajectory) -> None:
    ended = trajectory.exec("setsid sleep 1000 & echo started; sleep 1000", timeout_s=0.5)
    assert (ended.state, ended.reason) == ("timed_out", "timeout")
    assert "sleep" not in trajectory.exec("cat /proc/[0-9]*/comm").result["stdout"]
    assert client.get(ended.id).state == "timed_out"


@pytest.mark.promise("A log can be followed live.")
def test_the_first_line_reaches_a_follower_before_the_action_ends(client: Client, trajectory: Trajectory) -> None:
    trajectory.exec("mkfifo go")
    accepted = client.submit("shell", {"command": "echo first; read word < go; echo $word"}, trajectory=trajectory.id)
    following = (line for line in client.logs(accepted.id, follow=True) if line.stream == "stdout")
    assert next(following).text.strip() == "first"
    assert client.get(accepted.id).state == "running"
    client.cancel(accepted.id)
    assert client.wait(accepted.id).state == "cancelled"


@pytest.mark.promise("A reward is the verdict of the tests.")
def test_a_reward_is_the_tests_own_report(client: Client, trajectory: Trajectory) -> None:
    trajectory.upload("test_it.py", SUITE)
    wanted = {"fail_to_pass": ["test_it.py::test_works"], "pass_to_pass": ["test_it.py::test_odd_names[a b]"]}
    before = trajectory.invoke("tests", wanted).raise_for_failure().result
    assert (before["reward"], before["resolved"]) == (0.0, False)
    assert before["tests"]["test_it.py::test_odd_names[a b]"] == "passed"
    trajectory.upload("test_it.py", SUITE.replace("a - b", "a + b"))
    after = trajectory.invoke("tests", wanted).raise_for_failure().result
    assert (after["reward"], after["resolved"]) == (1.0, True)


@pytest.mark.promise("A suite that found none of the requested tests has no reward, and a reason, never a silent zero.")
def test_a_suite_that_runs_nothing_gets_no_reward(trajectory: Trajectory) -> None:
    trajectory.upload("test_it.py", "import os\nos._exit(0)\n")
    ended = trajectory.invoke("tests", {"fail_to_pass": ["test_it.py::test_works"]})
    assert ended.state != "succeeded" or ended.result["reward"] == 0.0
    assert ended.state != "succeeded" or ended.result["tests"] == {"test_it.py::test_works": "missing"}


def test_a_handler_is_imported_once_and_its_prints_are_the_log(client: Client) -> None:
    first, second = (client.invoke("double", {"value": value}, logs=True) for value in (3, 4))
    assert (first.result["double"], second.result["double"]) == (6, 8)
    assert first.result["pid"] == second.result["pid"]
    text = "".join(line.text for line in first.logs)
    assert "scoring 3" in text
    assert "careful with 3" in text


@pytest.mark.promise("An ended trajectory is gone; a caller that expected it to live gets 410.")
def test_an_ended_trajectory_is_gone(client: Client) -> None:
    name = f"gone-{uuid.uuid4().hex[:8]}"
    with client.trajectory(name, function="shell") as sandbox:
        sandbox.exec("true")
    with pytest.raises(NotFoundError):
        client.end_trajectory(name)
    assert name not in [each.trajectory for each in client.trajectories()]


def test_a_trajectory_chooses_its_sandbox(client: Client) -> None:
    """An image by another of its names, as the tests' engines have but one."""
    image = "docker.io/library/tangram-base:bookworm"
    containers = client.resources().sandboxes.kind == "container"
    asked = {"env": {"TASK_ID": "7"}, "workdir": "/box", "user": "root", "memory": "200Mi"}
    id = f"chosen-{uuid.uuid4().hex[:8]}"
    with client.trajectory(id, function="choosy", sandbox=asked | ({"image": image} if containers else {})) as chosen:
        ended = chosen.exec("echo $TASK_ID; pwd; id -u; cat /sys/fs/cgroup/memory.max /dev/null").raise_for_failure()
        assert ended.result["stdout"].splitlines()[:3] == ["7", "/box", "0"]
        refused = chosen.invoke("shell", {"command": "pwd"})
        assert refused.reason == "invalid_input" and "lives in another sandbox" in refused.message
    with pytest.raises(InvalidInputError if containers else UnsupportedError):
        client.trajectory(id, function="choosy", sandbox={"image": "elsewhere.example/x"}).open()
