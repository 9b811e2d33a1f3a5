"""The verbs that a server adds to the command ``tangram``, and the whole command for ``python -m gateway``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tangram.cli import main as client
from tangram.cli.main import Verb

#: What the entry point of the server in `tangram.cli.main.GROUP` names.
VERBS: Mapping[str, Verb] = {
    "serve": Verb("gateway.cli.serve:serve", "Serve until SIGTERM, then drain.", "serve"),
    "init": Verb("gateway.cli.serve:init", "Write a commented configuration and a function of each kind.", "serve"),
    "doctor": Verb("gateway.cli.serve:doctor", "Look whether this machine can serve a configuration.", "serve"),
    "images": Verb(
        "gateway.cli.maintenance:images", "Container images: built, pulled ahead of a run, and what there is.", "serve"
    ),
    "validate": Verb("gateway.cli.serve:validate", "Check configuration files.", "serve"),
    "config-schema": Verb(
        "gateway.cli.serve:config_schema", "Print the JSON Schema of the YAML, for editors.", "serve"
    ),
    "backup": Verb(
        "gateway.cli.maintenance:backup", "Copy the record to a file, also while a gateway serves.", "operate"
    ),
    "restore": Verb("gateway.cli.maintenance:restore", "Put such a copy back, while none does.", "operate"),
    "node": Verb("gateway.cli.node:node", "This machine as a node, and its daemon that joins a gateway.", "operate"),
    "clean": Verb("gateway.cli.maintenance:clean", "Show and remove what gateways left behind.", "operate"),
    "simulate": Verb(
        "gateway.cli.simulate:simulate", "Play a workload on the same scheduler under a virtual clock.", "operate"
    ),
    "report": Verb("gateway.cli.report:report", "One page of a real run, and of what it would have cost.", "watch"),
    "trace": Verb("gateway.cli.simulate:trace", "Traces of what trajectories did.", "operate"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit, also where the server is not installed."""
    client.main(arguments, VERBS)
