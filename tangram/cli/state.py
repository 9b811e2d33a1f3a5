"""Verbs on the gateway's state: functions, trajectories, images, tasks, steps, diff, apply, token."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import msgspec
from msgspec import UNSET

from tangram import Client, InvalidConfigError, UnauthorizedError
from tangram.cli.main import VerbGroup, inherit
from tangram.cli.options import connected, json_option, paths_argument
from tangram.cli.output import (
    TableColumn,
    cells,
    in_json,
    print_either,
    print_json,
    print_rows,
    record,
    say,
    short_id,
    show,
    show_seconds,
    table,
    transfers,
    visible,
)
from tangram.client.requests import DEFAULT, SERVER, find_token_of, server_of, why_without
from tangram.types import (
    ADMIN,
    INVOKE,
    ConfigDiff,
    FunctionInfo,
    ImageInfo,
    SnapshotInfo,
    StepInfo,
    TaskInfo,
    files_of,
    is_loopback,
    nothing_there,
)


@click.group(cls=VerbGroup)
def functions() -> None:
    """The registered functions."""


@functions.command("list")
@json_option
@connected
def list_functions(client: Client, as_json: bool) -> None:
    """List the functions."""
    found = client.functions()
    about = (lambda each: msgspec.to_builtins(each.cost), lambda each: each.problem or each.description)
    rows = cells(found, "name", "runtime", "revision", "status", "source", *about)
    print_rows(found, as_json, ("NAME", "RUNTIME", "REVISION", "STATUS", "SOURCE", "COST", "DESCRIPTION"), rows)


@functions.command("show")
@click.argument("name")
@click.option("--schema", is_flag=True, help="Print the JSON Schemas of its input and result instead.")
@json_option
@connected
def show_function(client: Client, name: str, schema: bool, as_json: bool) -> None:
    """Show how to call a function, its definition, and what was learned of it.

    \b
    tangram functions show shell
    tangram functions show shell --schema
    """
    function = client.function(name)
    if schema:
        print_json({"input": function.input_schema or {}, "result": function.result_schema or {}})
        return
    if as_json:
        print_json(function)
        return
    fields = msgspec.to_builtins(function)
    for each in ("learned", "input_schema", "result_schema"):
        fields.pop(each, None)
    show(_usage(function, client.server), "", record(fields))
    if function.learned:
        rows = [
            (
                key or "(all)",
                show_seconds(each.t_ori_s),
                f"{100 * each.error:.0f}%",
                each.serial_fraction,
                each.batch_marginal,
                "" if each.size is None else f"{each.size.fixed_s:.3g} + {each.size.per_unit_s:.3g} x size",
                each.observations,
            )
            for key, each in function.learned.items()
        ]
        show(
            "",
            table(("LEARNED KEY", "T_ORI", "ERROR", "SERIAL FRACTION", "BATCH MARGINAL", "BY SIZE [s]", "RUNS"), rows),
        )


def _usage(function: FunctionInfo, server: str) -> Iterator[str]:
    """Yield how a function is called, from a shell and from Python, and the fields of its input."""
    schema = function.input_schema or {}
    assert isinstance(schema, Mapping)
    # A field's schema may be `true`: anything will do.
    properties = {
        name: each if isinstance(each, Mapping) else {} for name, each in schema.get("properties", {}).items()
    }
    needed = _needed_fields(schema)
    example = in_json({name: _example(name, properties.get(name, {})) for name in needed})
    rollout = " --trajectory t1" if function.runtime in ("exec", "pytest") else ""
    yield f"tangram invoke {function.name} {shlex.quote(example)}{rollout}"
    yield 'curl -H "Authorization: Bearer $(tangram token)" \\'
    yield f"  -d {shlex.quote(example)} \\"
    yield f"  {server}/v1/functions/{function.name}/invocations"
    yield f'client.invoke("{function.name}", {example})'
    if properties:
        rows = [
            (f"{name} *" if name in needed else name, _type(each), each.get("description", ""))
            for name, each in sorted(properties.items(), key=lambda item: item[0] not in needed)
        ]
        yield ""
        yield from table(("INPUT", "TYPE", TableColumn("DESCRIPTION", 20, wraps=True)), rows)


def _needed_fields(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the fields that an input needs; where one of several does, the first."""
    choices: list[Mapping[str, Any]] = [*schema.get("oneOf", ()), *schema.get("anyOf", ()), {}]
    return [*schema.get("required", ()), *choices[0].get("required", ())]


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(map(str, schema["enum"]))
    kinds = schema.get("type") or [each.get("type", "any") for each in schema.get("anyOf", ())]
    return kinds if isinstance(kinds, str) else "|".join(kinds) or "any"


#: What stands for a value in an example, by the type of its schema.
_EXAMPLES: Mapping[str, object] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


def _example(name: str, schema: Mapping[str, Any]) -> object:
    if "enum" in schema:
        return schema["enum"][0]
    return "echo hello" if name == "command" else _EXAMPLES.get(_type(schema), "...")


@functions.command("remove")
@click.argument("names", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@connected
def remove_functions(client: Client, names: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Remove functions that were applied; nothing in flight is dropped.

    \b
    tangram functions remove length
    """
    removed = [name for each in names for name in client.remove_function(each, dry_run=dry_run).removed]
    key, done = ("would_remove", "would be removed") if dry_run else ("removed", "removed")
    print_either({key: removed}, as_json, *(f"{name} {done}" for name in removed))


@click.group(cls=VerbGroup)
def trajectories() -> None:
    """The living trajectories."""


@trajectories.command("list")
@json_option
@connected
def list_trajectories(client: Client, as_json: bool) -> None:
    """List the living trajectories."""
    found = client.trajectories()
    where = (lambda each: each.node or None, "memory_bytes", lambda each: each.active and short_id(each.active))
    rows = cells(found, "trajectory", "task", "state", "idle_s", "queued", *where, "ttl_s", "lease_left_s")
    names = ("TRAJECTORY", "TASK", "STATE", "IDLE", "QUEUED", "NODE", "MEMORY", "ACTIVE", "TTL", "LEASE")
    print_rows(found, as_json, names, rows)


@trajectories.command("open")
@click.argument("id")
@click.option(
    "--function", metavar="NAME", default="shell", show_default=True, help="The function whose sandbox it is."
)
@click.option("--task", metavar="NAME", help="The RL task that it belongs to.")
@click.option("--step", type=click.IntRange(min=0), help="The step of the task that it counts for.")
@click.option("--image", metavar="IMAGE", help="Container image, of those that the function allows.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="An environment variable; may be repeated.")
@click.option("--workdir", metavar="PATH", help="Working directory.")
@click.option("--user", metavar="USER", help="User name or id.")
@click.option("--memory", metavar="SIZE", help="For example 2Gi.")
@click.option("--network", type=click.Choice(["none", "internal", "egress"]), help="What it may reach.")
@click.option("--idle-ttl", metavar="DURATION", help="It ends after so long without an action, for example 30m.")
@click.option("--snapshot", metavar="ID", help="Begin with a snapshot, in place of choices.")
@json_option
@connected
def open_trajectory(
    client: Client,
    /,
    id: str,
    function: str,
    task: str | None,
    step: int | None,
    env: tuple[str, ...],
    snapshot: str | None,
    as_json: bool,
    **chosen: str | None,
) -> None:
    """Make a trajectory's sandbox before its first action, with what it chooses.

    \b
    tangram trajectories open t1 --memory 2Gi --idle-ttl 2h
    """
    choices: dict[str, object] = {name: value for name, value in chosen.items() if value is not None}
    if env:
        choices["env"] = dict(_variable(each) for each in env)
    chosen_sandbox = choices or None
    client.trajectory(id, function=function, task=task, step=step, sandbox=chosen_sandbox, snapshot=snapshot).open()
    print_either({"opened": id}, as_json, f"{id} is open")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--env")
    return name, value


@trajectories.command("snapshot")
@click.argument("id")
@json_option
@connected
def take_snapshot(client: Client, id: str, as_json: bool) -> None:
    """Keep the files of a trajectory's sandbox, when its actions so far have ended; print the snapshot's id.

    \b
    tangram trajectories snapshot t1
    """
    taken = client.trajectory(id).snapshot()
    print_either(taken, as_json, taken.snapshot)


@trajectories.command("fork")
@click.argument("id")
@click.argument("to", nargs=-1, required=True)
@click.option(
    "--function", metavar="NAME", default="shell", show_default=True, help="The function whose sandbox it is."
)
@click.option("--task", metavar="NAME", help="The RL task that they belong to, by default the other's.")
@click.option("--step", type=click.IntRange(min=0), help="The step of the task that they count for.")
@json_option
@connected
def fork_trajectory(
    client: Client, id: str, to: tuple[str, ...], function: str, task: str | None, step: int | None, as_json: bool
) -> None:
    """Open trajectories TO that begin with the files of ID as they are now.

    \b
    tangram trajectories fork t1 t1-a t1-b
    """
    opened = client.trajectory(id, function=function, task=task).fork(to, step=step)
    if as_json:
        print_json({"opened": [each.id for each in opened]})
        return
    for each in opened:
        click.echo(f"{each.id} is open")


@trajectories.group("snapshots")
def snapshots() -> None:
    """The snapshots of trajectories."""


@snapshots.command("list")
@json_option
@connected
def list_snapshots(client: Client, as_json: bool) -> None:
    """List the snapshots, the oldest first."""
    found = client.snapshots()
    rows = cells(found, "snapshot", "trajectory", "task", _where, "size_bytes", "made_at", "in_use")
    print_rows(found, as_json, ("SNAPSHOT", "TRAJECTORY", "TASK", "NODE", "SIZE", "TAKEN", "IN USE"), rows)


def _where(snapshot: SnapshotInfo) -> str:
    return f"{snapshot.node} (lost)" if snapshot.lost else snapshot.node


@snapshots.command("remove")
@click.argument("ids", nargs=-1, required=True)
@json_option
@connected
def remove_snapshots(client: Client, ids: tuple[str, ...], as_json: bool) -> None:
    """Remove snapshots; one that a living trajectory began with is kept, with status 73.

    \b
    tangram trajectories snapshots remove ID
    """
    for id in ids:
        client.remove_snapshot(id)
        if not as_json:
            click.echo(f"{id} removed")
    if as_json:
        print_json({"removed": ids})


@trajectories.command("end")
@click.argument("ids", nargs=-1, required=True)
@connected
def end_trajectories(client: Client, ids: tuple[str, ...]) -> None:
    """End trajectories: their actions are cancelled and their sandboxes removed.

    \b
    tangram trajectories end t1 t2
    """
    for id in ids:
        client.end_trajectory(id)
        click.echo(f"{id} ended")


@click.command()
@json_option
@connected
def tasks(client: Client, as_json: bool) -> None:
    """RL tasks: their weights, bounds, and use in core-seconds, gpu-seconds, units of quotas and seconds of slots."""
    infos = client.tasks()
    print_json(infos) if as_json else show(table(TASKS, task_rows(infos)))


TASKS = (
    TableColumn("TASK", 12),
    TableColumn("WAITING", 7),
    TableColumn("RUNNING", 7),
    TableColumn("ENDED", 6),
    TableColumn("FAILED", 6),
    TableColumn("STEP", 10, 2),
    TableColumn("ENDS IN", 7, 3),
    TableColumn("ACT", 6, 4),
    TableColumn("CORE TIME", 9, 5),
    TableColumn("GPU TIME", 8, 6),
    TableColumn("QUOTAS", 6, 7),
    TableColumn("SLOT TIME", 9, 8),
    TableColumn("WEIGHT", 6, 9),
    TableColumn("BOUNDS", 6, 10),
)


def task_rows(infos: Iterable[TaskInfo]) -> list[tuple[object, ...]]:
    """Return the cells of `TASKS`; STEP tells the one that opened last, with its ended and expected rollouts."""
    rows: list[tuple[object, ...]] = []
    for each in infos:
        settled = {} if each.settled is UNSET else each.settled
        ended, completed = sum(settled.values()), each.completed or 0
        step = each.steps[0] if each.steps else None
        bounds = {**each.caps, **({} if each.max_queued is None else {"queued": each.max_queued})}
        rows.append(
            (
                each.task,
                each.queued,
                each.running,
                ended,
                ended - settled.get("succeeded", 0) - settled.get("cancelled", 0),
                None if step is None else f"{step.step}: {step.ended}/{step.expected or '?'}",
                show_seconds(None if step is None else step.ends_in_s),
                show_seconds((each.act_s or 0.0) / completed if completed else None),
                show_seconds(each.core_s),
                show_seconds(each.gpu_s),
                each.quota_units,
                {kind: show_seconds(used) for kind, used in each.slot_s.items()},
                each.weight,
                bounds,
            )
        )
    return rows


@click.group(cls=VerbGroup)
def images() -> None:
    """The container images of the gateway's sandboxes."""


@images.command("list")
@json_option
@connected
def list_images(client: Client, as_json: bool) -> None:
    """List the images, and how far pulls are."""
    _show_images(client.images(), as_json)


@images.command("pull")
@click.argument("names", nargs=-1, required=True)
@click.option("--no-wait", is_flag=True, help="Do not wait for the pulls to end.")
@json_option
@connected
def pull_images(client: Client, names: tuple[str, ...], no_wait: bool, as_json: bool) -> int:
    """Pull images ahead of a run; the status is 1 if one could not be.

    \b
    tangram images pull python:3.12-slim
    """
    found = client.pull_images(names)
    with transfers() as (look_s, tell):
        while not no_wait and any(each.state == "pulling" for each in found):
            wanted = [each.image for each in found if each.state != "failed"]
            found = client.pull_images(wanted, wait_s=look_s) or found
            for each in found if not as_json else ():
                if each.state == "pulling":
                    tell(each.image, each.done_bytes, each.total_bytes)
    _show_images(
        client.images() if no_wait else [each for each in client.images() if _named(each.image, names)], as_json
    )
    return int(any(each.state == "failed" and _named(each.image, names) for each in client.images()))


def _named(image: str, names: Sequence[str]) -> bool:
    return image in names or image.removesuffix(":latest") in names


def _show_images(images: Sequence[ImageInfo], as_json: bool) -> None:
    rows = cells(images, "image", "state", "size_bytes", "pulled", "kept", "problem")
    print_rows(images, as_json, ("IMAGE", "STATE", "SIZE", "PULLED", "KEPT", "PROBLEM"), rows)


@click.command()
@click.argument("task")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--expected", type=click.IntRange(min=1), help="Tell that STEP is to have so many rollouts.")
@json_option
@connected
def steps(client: Client, task: str, step: int | None, expected: int | None, as_json: bool) -> None:
    """Steps of TASK that the gateway keeps, that opened last first; or of STEP alone.

    Rollouts are trajectories that were opened under a step, and calls of none that name it.

    \b
    tangram steps default
    tangram steps default 7 --expected 512
    """
    if expected is not None:
        if step is None:
            raise click.UsageError("--expected tells of a step: name it, tangram steps TASK STEP --expected N")
        infos = [client.tell_step(task, step, expected=expected)]
    else:
        infos = [each for each in client.steps(task) if step in (None, each.step)]
    rows = cells(infos, "step", "expected", "living", "waiting", "ended", "opened_at", _took, "ends_in_s")
    print_rows(infos, as_json, ("STEP", "EXPECTED", "LIVING", "WAITING", "ENDED", "OPENED", "TOOK", "ENDS IN"), rows)


def _took(step: StepInfo) -> str:
    return show_seconds(None if step.ended_at is None else (step.ended_at - step.opened_at).total_seconds())


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-[^}]*)?\}")
_prune = click.option("--prune", is_flag=True, help="Remove what PATHS do not name; without it that stays.")
_own = click.option("--own", is_flag=True, help="The gateway reads its own files again, instead of PATHS.")


@click.command()
@paths_argument
@_own
@_prune
@json_option
@connected
def diff(client: Client, paths: tuple[Path, ...], own: bool, prune: bool, as_json: bool) -> None:
    """What `apply` would change in a running gateway.

    \b
    tangram diff
    """
    texts = _texts(paths, own, client.server)
    _show_diff(client.apply(texts, dry_run=True, prune=prune, variables=_variables(texts)), as_json)


@click.command()
@paths_argument
@_own
@_prune
@json_option
@connected
def apply(client: Client, paths: tuple[Path, ...], own: bool, prune: bool, as_json: bool) -> None:
    """Add and change functions, tasks and resources of a running gateway; --prune also removes what is not named.

    All or nothing; nothing in flight is dropped, a changed function serves new invocations only. Handlers and models
    stay where they are: on the gateway's disk. ${NAME} in PATHS is taken from the environment of this command. What
    --prune removes is shown first, and on a terminal asked about.

    \b
    tangram diff && tangram apply
    """
    texts = _texts(paths, own, client.server)
    variables = _variables(texts)
    if prune:
        planned = client.apply(texts, dry_run=True, prune=True, variables=variables)
        removed = [f"- {name}" for name in planned.removed]
        if removed:
            say("\n".join(removed))
            if sys.stdin.isatty():
                click.confirm(f"remove {len(removed)} functions?", abort=True, err=True)
    _show_diff(client.apply(texts, dry_run=False, prune=prune, variables=variables), as_json)


def _variables(texts: Mapping[str, str] | None) -> dict[str, str]:
    """Return what the texts name of the environment."""
    named = {match[1] for text in (texts or {}).values() for match in _VARIABLE.finditer(text)}
    return {name: os.environ[name] for name in sorted(named) if name in os.environ}


def _texts(paths: Sequence[Path], own: bool, server: str) -> dict[str, str] | None:
    """Return the files' texts, each once, by absolute path; None for the gateway's own. Raises InvalidConfigError.

    Paths mean nothing on another machine: for a gateway there they are relative to the current directory.
    """
    here = is_loopback(urlsplit(server).hostname or "")
    if own:
        if paths:
            raise click.UsageError("--own takes no PATHS: the gateway knows its files")
        return None
    texts: dict[Path, tuple[str, str]] = {}
    problems = []
    for path in paths or (Path(),):
        files = files_of(path)
        if not files:
            problems.append(f"{path}: {nothing_there(path)}")
        for file in files:
            try:
                path = file.absolute() if here else Path(os.path.relpath(file))
                texts.setdefault(file.resolve(), (str(path), file.read_text(encoding="utf-8")))
            except (OSError, UnicodeError) as error:
                problems.append(f"{file}: cannot be read: {error}")
    if problems:
        raise InvalidConfigError("\n".join(problems))
    return dict(texts.values())


def _show_diff(diff: ConfigDiff, as_json: bool) -> None:
    if as_json:
        print_json(diff)
        return
    lines = [f"+ {name}" for name in diff.added]
    for name, keys in diff.changed.items():
        lines.append(f"~ {name} ({', '.join(keys)})")
        lines += [f"    {key}: {each.was} -> {each.now}" for key, each in diff.values.get(name, {}).items()]
    lines += [f"- {name}" for name in diff.removed]
    lines += [f"~ task {name}" for name in diff.tasks]
    lines += [f"~ resource {name}" for name in diff.resources]
    lines += [f"! {key} needs a restart" for key in diff.needs_restart]
    click.echo(visible("\n".join(lines)) or "no change")


@click.command()
@click.option("--admin", is_flag=True, help="The one that may also change the gateway for everybody.")
@click.option("--server", metavar="URL", callback=inherit, help=f"The gateway [{SERVER}, or {DEFAULT}].")
@json_option
def token(admin: bool, server: str | None, as_json: bool) -> None:
    """Print a token of the gateway that you serve on this machine: curl -H "Authorization: Bearer $(tangram token)"."""
    address = server_of(server)
    value = find_token_of(httpx.URL(address), (ADMIN,) if admin else (INVOKE,))
    if value is None:
        if why := why_without(httpx.URL(address)):
            raise UnauthorizedError(why, component="client")
        raise UnauthorizedError(
            f"no gateway of this user serves at {address} on this machine, or its token is one that was configured: "
            "ask whoever started it, and set TANGRAM_TOKEN",
            component="client",
        )
    click.echo(json.dumps({"token": value}) if as_json else value)


@click.command()
@json_option
@connected
def page(client: Client, as_json: bool) -> None:
    """Print an address that opens the page in one browser, once, within an hour. Needs the admin token.

    \b
    tangram page
    """
    address = client.page_address()
    if as_json:
        print_json({"url": address})
        return
    click.echo(address)
    url = urlsplit(client.server)
    if is_loopback(url.hostname or ""):
        port = url.port or 80
        say(
            f"from another machine, first: ssh -N -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"
        )
