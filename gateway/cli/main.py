"""The command line: ``tangram VERB``. Each verb is loaded when it is used, so that the prompt answers at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

from gateway.cli.output import say
from gateway.errors import FACES
from manager.errors import CodedError
from tangram import TangramError

#: Verb -> where it lives.
VERBS: Mapping[str, str] = {
    "serve": "gateway.cli.config:serve",
    "validate": "gateway.cli.config:validate",
    "diff": "gateway.cli.config:diff",
    "apply": "gateway.cli.config:apply",
    "config-schema": "gateway.cli.config:config_schema",
    "node": "gateway.cli.config:node",
    "functions": "gateway.cli.state:functions",
    "invoke": "gateway.cli.invocations:invoke",
    "ps": "gateway.cli.invocations:ps",
    "get": "gateway.cli.invocations:get",
    "logs": "gateway.cli.invocations:logs",
    "cancel": "gateway.cli.invocations:cancel",
    "dlq": "gateway.cli.dead_letters:dlq",
    "trajectories": "gateway.cli.state:trajectories",
    "tasks": "gateway.cli.state:tasks",
    "top": "gateway.cli.top:top",
    "plan": "gateway.cli.simulate:plan",
    "simulate": "gateway.cli.simulate:simulate",
    "trace": "gateway.cli.simulate:trace",
}

#: Exit status when the gateway cannot be reached (sysexits: unavailable), and when a keyboard interrupt ended us.
UNREACHABLE, INTERRUPTED = 69, 130


class Verbs(click.Group):
    """A group whose commands are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = VERBS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tangram-gateway", prog_name="tangram")
def cli() -> None:
    """A serverless-style function gateway for agentic reinforcement learning."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit; an error is one story on standard error and its status of `gateway.errors`."""
    try:
        status = cli.main(
            args=None if arguments is None else list(arguments), prog_name="tangram", standalone_mode=False
        )
    except click.exceptions.Abort:
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (CodedError, TangramError) as error:
        say(f"{error.component}: {error.code}: {error.message}")
        sys.exit(exit_status(error))
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(status if isinstance(status, int) else 0)


def exit_status(error: CodedError | TangramError) -> int:
    """The exit status of a refused request."""
    if error.code == "connection_failed":
        return UNREACHABLE
    return FACES.get(error.code, FACES["internal"]).exit
