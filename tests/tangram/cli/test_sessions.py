"""``tangram exec``: where its options end and the command begins."""

from __future__ import annotations

import click
import pytest

from tangram.cli.sessions import exec_


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
