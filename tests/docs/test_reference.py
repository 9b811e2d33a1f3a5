"""The reference pages name everything that there is, and nothing that is not."""

from __future__ import annotations

import hashlib
import hmac
import inspect
import re
import time
from pathlib import Path
from typing import Any

import click
import orjson
import pytest

from gateway.cli import main as server
from gateway.config.load import load
from gateway.config.schema import MAPS, SECTIONS, form_name, schema
from gateway.errors import ERROR_STATUSES, REASON_STATUSES
from gateway.grpc.generated import tangram_pb2
from gateway.http.app import operations
from gateway.invocations.callbacks import sign
from runtimes.kinds import KINDS
from runtimes.sandbox.handler.worker import Context
from scripts.reference import CHAPTERS, REACHED, errors_markdown, markdown, metrics_markdown, runtimes_markdown
from tangram import AsyncClient, AsyncTrajectory, InvocationResult, MapProgress
from tangram.cli import exit_status
from tangram.cli import main as client
from tangram.cli.main import command_line
from tests.gateway.conftest import FUNCTIONS, GatewayBench, serving
from tests.house.source import texts

VERBS = {**client.VERBS, **server.VERBS}

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8")


def code(text: str) -> set[str]:
    """Everything in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_yaml_page_holds_the_tables_of_the_models() -> None:
    assert page("yaml").endswith(markdown()), "run: python -m scripts.reference"


def test_what_is_told_of_a_bound_stands_beside_its_key() -> None:
    for path, told in REACHED.items():
        place, _, key = path.rpartition(".")
        chapter = page("yaml").partition(f"### `{place}`")[2].partition("\n### ")[0]
        assert re.search(rf"^\| `{key}` \|.*\| {re.escape(told)} \|$", chapter, re.MULTILINE), path


def test_the_runtimes_page_holds_the_tables_of_the_kinds_and_the_handlers_context() -> None:
    assert page("runtimes").endswith(runtimes_markdown()), "run: python -m scripts.reference"
    attributes = set(re.findall(r"self\.(\w+)[:\w\s|]* = ", inspect.getsource(Context))) | {"remaining_s"}
    assert {each for each in attributes if not each.startswith("_")} <= code(page("runtimes"))
    assert "`log(message" in page("runtimes")


def test_every_section_of_the_yaml_has_its_chapter() -> None:
    definitions = schema()["$defs"]
    assert isinstance(definitions, dict)
    with_keys = {name for name, each in definitions.items() if "properties" in each}
    chapters = {name for name, _ in CHAPTERS}
    of_functions = {form_name(kind) for kind in KINDS.values()} - chapters
    assert with_keys - chapters == of_functions
    for name in of_functions:
        own = set(definitions[name]["properties"]) - set(definitions["ExecFunction"]["properties"])
        assert all(f"functions.NAME.{key}" in page("yaml") for key in own), own
    assert {*SECTIONS, *MAPS} <= code(page("yaml"))


def test_the_yaml_pages_example_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", page("yaml"), re.DOTALL)
    (tmp_path / "tangram.yaml").write_text(example)
    assert list(load([tmp_path], {}).functions) == ["unit_tests"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_its_own_options_are_on_the_cli_page(verb: str) -> None:
    line = command_line(server.VERBS)
    command = line.get_command(click.Context(line), verb)
    assert command is not None
    lines = [line for line in page("cli").splitlines() if re.search(rf"`tangram {verb}\b", line)]
    assert lines, verb
    subcommands = list(command.commands.values()) if isinstance(command, click.Group) else []
    assert all(f"tangram {verb} {each.name}" in lines[0] for each in subcommands)
    shared = {"--json", "--server", "--token", "--retry-connrefused", "--follow", "--limit"}
    options = {max(each.opts, key=len) for each in command.params if isinstance(each, click.Option)}
    # `apply` has the options of `diff`.
    assert [each for each in options - shared if each not in lines[0] and each != "--no-look"] in ([], ["--own"])


def test_the_cli_page_names_no_verb_that_is_not_there() -> None:
    named = {match for text in code(page("cli")) for match in re.findall(r"^tangram ([a-z-]+)", text)}
    assert named == set(VERBS)


def test_the_cli_page_names_every_exit_status() -> None:
    listed = {int(row) for row in re.findall(r"^\| (\d+) \|", page("cli"), re.MULTILINE)}
    used = {exit_status.INTERRUPTED, *exit_status.BY_CODE.values(), *exit_status.BY_REASON.values()}
    assert used - {64} <= listed
    for reason, status in exit_status.BY_REASON.items():
        rows = re.findall(rf"^\| {status} \|.*$", page("cli"), re.MULTILINE)
        assert f"`{reason}`" in rows[0], reason


def test_the_errors_page_holds_the_table_of_the_classes() -> None:
    assert page("errors").endswith(errors_markdown()), "run: python -m scripts.reference"


async def test_every_route_and_header_is_on_the_http_page(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as running:
        document = (await running.http.get("/openapi.json")).raise_for_status().json()
    text = page("http")
    of_functions = {f"/v1/functions/{name}/invocations" for name in FUNCTIONS}
    assert of_functions <= document["paths"].keys()
    for path in document["paths"].keys() - of_functions:
        for method, operation in document["paths"][path].items():
            assert f"`{method.upper()} {path}`" in text, f"{method.upper()} {path}"
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "header":
                    assert parameter["name"] in text, parameter["name"]


async def test_the_http_page_names_no_route_that_is_not_there(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as running:
        for method, path in re.findall(r"`(GET|PUT|POST|DELETE) (/[^`?]*)`", page("http")):
            async with running.http.stream(method, re.sub(r"\{(\w+)\}", "x", path)) as answer:
                is_json = "json" in answer.headers.get("content-type", "")  # else it may have no end
                body = orjson.loads(await answer.aread()) if is_json else {}
            assert answer.status_code != 405, (method, path)
            assert "no such path" not in str(body.get("detail", "")), (method, path)


def test_the_http_page_names_every_status() -> None:
    listed = {int(row) for row in re.findall(r"^\| (\d+) \|", page("http"), re.MULTILINE)}
    assert {each.http for each in (*ERROR_STATUSES.values(), *REASON_STATUSES.values())} <= listed


def test_every_method_and_message_is_on_the_grpc_page() -> None:
    text = code(page("grpc"))
    service = tangram_pb2.DESCRIPTOR.services_by_name["Gateway"]
    assert set(service.methods_by_name) <= text
    assert {each.grpc for each in (*ERROR_STATUSES.values(), *REASON_STATUSES.values())} - {"OK"} <= text
    assert {name for name in tangram_pb2.DESCRIPTOR.message_types_by_name if "Entry" not in name} <= text


def test_every_method_and_field_is_on_the_clients_page() -> None:
    text = page("client")
    for owner in (AsyncClient, AsyncTrajectory):
        methods = [name for name in vars(owner) if not name.startswith("_")]
        assert [name for name in methods if f"`{name}" not in text] == []
    assert [name for name in InvocationResult.__struct_fields__ if f"`{name}`" not in text] == []
    assert [name for name in MapProgress.__dataclass_fields__ if name not in text] == []


def test_the_example_of_a_scripted_gateway_runs() -> None:
    *_, example = re.findall(r"```python\n(.*?)```", page("client"), re.DOTALL)
    exec(compile(example, "client.md", "exec"), {})


def test_every_section_of_the_scheduling_page_that_is_cited_is_there() -> None:
    """Code cites by number (`SCHEDULING.md 1.3`, `SCHEDULING.md R9`); one list may name several readings."""
    text = (REFERENCE.parent / "SCHEDULING.md").read_text(encoding="utf-8")
    there = set(re.findall(r"^###? (\d+(?:\.\d+)?)", text, re.MULTILINE)) | set(
        re.findall(r"^- \*\*(R\d+)\.", text, re.M)
    )
    cited = {
        number
        for _, source in texts()
        for found in re.findall(r"SCHEDULING\.md ((?:R?\d+(?:\.\d+)?(?:, )?)+)", source)
        for number in found.rstrip(", ").split(", ")
    }
    assert {"1.1", "1.4", "R9", "R13"} <= cited, "the code cites the page"
    assert cited <= there


PAGES = [page for part in ("docs/**/*.md", "deploy/*.md", "*.md") for page in sorted(REFERENCE.parents[1].glob(part))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\((?!https?://)([^)#]+(?:#[^)]*)?)\)", text)]
    assert [target for target in targets if not (path.parent / target).exists()] == []


async def test_the_http_page_names_every_route_that_the_invoke_token_is_refused(tmp_path: Path) -> None:
    (row,) = re.findall(r"^\| invoke token \|.*$", page("http"), re.MULTILINE)
    async with serving(GatewayBench(tmp_path)) as running:
        refused = {f"{each.method} {each.path}" for each in operations(running.app.api) if each.admin}
    assert code(row) - {"forbidden"} - {"403"} == refused


def test_the_example_on_the_http_page_knows_a_callback_from_a_forged_one() -> None:
    (text,) = re.findall(r"```python\n(def is_genuine.*?)```", page("http"), re.DOTALL)
    names: dict[str, Any] = {"hashlib": hashlib, "hmac": hmac, "time": time}
    exec(text, names)
    stamp = str(int(time.time()))
    headers = {"X-Tangram-Timestamp": stamp, "X-Tangram-Signature": f"sha256={sign('key', stamp, b'{}')}"}
    is_genuine = names["is_genuine"]
    assert is_genuine(headers, b"{}", "key")
    assert not is_genuine(headers, b"{ }", "key") and not is_genuine(headers, b"{}", "other")
    assert not is_genuine({**headers, "X-Tangram-Timestamp": str(int(stamp) - 1)}, b"{}", "key")


async def test_the_page_of_metrics_holds_every_metric_of_a_gateway(tmp_path: Path) -> None:
    traces = {"endpoint": "http://127.0.0.1:9/v1/traces", "share": 0}
    async with serving(GatewayBench(tmp_path, server={"traces": traces})) as gateway:
        await gateway.invoke({})
        await gateway.invoke({}, function="nope")
        table = metrics_markdown(gateway.app.metrics.registry)
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith(table), f"it is to end with:\n{table}"
    assert table.count("\n") > 30
