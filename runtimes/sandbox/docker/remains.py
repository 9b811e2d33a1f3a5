"""Remains on an engine: what gateways that are gone left there, by its labels. Everything here blocks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker.errors

from manager.errors import CodedError
from runtimes.sandbox.docker.client import AWAY, EngineConnection
from runtimes.sandbox.record import SANDBOXES
from runtimes.sandbox.remains import Remnant, verdict
from runtimes.sandbox.snapshots.record import LABEL, SNAPSHOTS

#: Labels of all that is ours: the gateway, its sandbox, its state directory, and whose file system that is on.
GATEWAY, NAME, STATE, MACHINE = "tangram.gateway", "tangram.sandbox", "tangram.state", "tangram.machine"
#: The id of its own user; a snapshot's files are of the same.
UID = "tangram.uid"
COMPONENT = "sandbox.container"


def machine_id() -> str:
    """Return what two processes have in common that see the same files under the same names."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        machine = ""
    return f"{machine or os.uname().nodename}:{Path('/proc/self/ns/mnt').stat().st_ino}"


class EngineRemains:
    """The containers, networks and snapshots of every gateway that this engine has served."""

    def __init__(self, connection: EngineConnection) -> None:
        self._api = connection.api
        #: What was found, by kind and name: the id.
        self._ids: dict[tuple[str, str], str] = {}
        #: State directories of this machine that labels name, and the sandboxes whose directories are in them.
        self.state_dirs: set[str] = set()
        self.sandboxes: set[str] = set()

    def find(self) -> list[Remnant]:
        wanted = {"label": GATEWAY}
        containers: Sequence[Mapping[str, Any]] = self._api.containers(all=True, filters=wanted)
        networks: Sequence[Mapping[str, Any]] = self._api.networks(filters=wanted)
        images: Sequence[Mapping[str, Any]] = self._api.images(filters={"label": [GATEWAY, LABEL]})
        found = [self._remnant("container", item["Names"][0].lstrip("/"), item) for item in containers]
        found += [self._remnant("network", item["Name"], item) for item in networks]
        return found + [self._remnant("snapshot", item["Labels"][LABEL], item) for item in images]

    def _remnant(self, kind: str, name: str, item: Mapping[str, Any]) -> Remnant:
        labels = item.get("Labels") or {}
        self._ids[kind, name] = str(item["Id"])
        state_dir = str(labels.get(STATE, ""))
        self.sandboxes.add(name if kind == "snapshot" else str(labels.get(NAME, "")))
        if labels.get(MACHINE) == machine_id():
            self.state_dirs.add(state_dir)
            held, why = verdict(state_dir)
        else:
            held, why = True, "its gateway is in a container: nobody here knows whether it lives"
        return Remnant(kind=kind, name=name, state_dir=state_dir, held=held, why=why)

    def remove(self, remnant: Remnant) -> None:
        known = self._ids[remnant.kind, remnant.name]
        try:
            if remnant.kind == "network":
                self._api.remove_network(known)
            elif remnant.kind == "snapshot":
                self._api.remove_image(known, force=True)
            else:
                self._api.remove_container(known, force=True, v=True)
        except docker.errors.NotFound:
            pass
        except AWAY as error:
            raise CodedError(f"{remnant.kind} {remnant.name}: {error}", component=COMPONENT) from None
        if remnant.kind == "snapshot" and remnant.state_dir in self.state_dirs:
            shutil.rmtree(Path(remnant.state_dir, SNAPSHOTS, remnant.name), ignore_errors=True)
        if remnant.kind == "container" and remnant.state_dir in self.state_dirs:
            sandbox = remnant.name.removeprefix("tangram-")
            shutil.rmtree(Path(remnant.state_dir, SANDBOXES, sandbox), ignore_errors=True)
