"""The verbs on configuration files and on this machine."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tangram.cli.conftest import Tangram


def test_validate_tells_every_problem_and_says_so_with_its_status(tangram: Tangram, tmp_path: Path) -> None:
    file = tmp_path / "tangram.yaml"
    file.write_text("server: {prot: 1}\nnod: {}\n")
    status, out, err = tangram("validate", str(tmp_path))
    assert (status, out) == (78, "")
    assert f"{file}:1: server.prot: unknown key 'prot'; did you mean 'port'?" in err
    assert f"{file}:2: nod: unknown key 'nod'; did you mean 'node'?" in err
    status, out, _ = tangram("validate", "--json", str(tmp_path))
    assert status == 78
    assert [each["line"] for each in json.loads(out)["problems"]] == [2, 1]
    file.write_text("functions: {f: {runtime: exec}}")
    assert tangram("validate", str(tmp_path))[:2] == (0, "1 files, 1 functions: f\n")


def test_the_schema_is_printed(tangram: Tangram) -> None:
    assert json.loads(tangram("config-schema")[1])["title"] == "tangram configuration"


def test_the_machine_is_shown(tangram: Tangram, tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text("node: {name: here, devices: {kind: cpu}}")
    described = json.loads(tangram("node", "--json", str(tmp_path))[1])
    assert described["name"] == "here" and described["numa"]


def test_validate_warns_of_what_this_machine_would_refuse(tangram: Tangram, tmp_path: Path) -> None:
    file = tmp_path / "tangram.yaml"
    file.write_text("functions: {wide: {runtime: exec, cost: {cpu: 60000}}}")
    status, _, err = tangram("validate", str(file))
    assert status == 0, "it is valid"
    assert "warning: function wide" in err and "60000" in err
    status, out, _ = tangram("validate", "--json", str(file))
    assert any("60000" in each for each in json.loads(out)["warnings"])
    assert "warning" not in tangram("validate", "--no-look", str(file))[2]


def test_serve_refuses_a_level_that_there_is_not(tangram: Tangram, tmp_path: Path) -> None:
    status, _, err = tangram("serve", "--log-level", "bogus", str(tmp_path))
    assert status == 2
    assert "'bogus' is not one of" in err
