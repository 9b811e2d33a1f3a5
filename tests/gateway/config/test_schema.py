"""The JSON Schema that editors complete with: shipped, current, and true to what loads."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from gateway.config.load import load
from gateway.config.schema import schema
from gateway.config.yaml import parse

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "gateway" / "config" / "schema.json"
EXAMPLES = [ROOT / "tangram.yaml", *sorted(ROOT.glob("functions/*/function.yaml"))]


def example_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def accepts(text: str) -> bool:
    # As an editor reads it: YAML 1.2, variables not replaced, and keys as text.
    document = parse(text.replace("${", "$${"), Path("x.yaml"), {})
    assert not document.problems
    value = json.loads(json.dumps(document.values))
    return jsonschema.Draft202012Validator(schema()).is_valid(value)


def test_the_shipped_schema_is_the_one_of_the_models() -> None:
    written = json.dumps(schema(), indent=2, sort_keys=True) + "\n"
    assert SHIPPED.read_text(encoding="utf-8") == written, "run: tangram config-schema > gateway/config/schema.json"
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("path", EXAMPLES, ids=example_id)
def test_every_example_fits_the_schema_and_names_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert accepts(text)
    marker = "# yaml-language-server: $schema="
    first = text.splitlines()[0]
    assert first.startswith(marker)
    assert (path.parent / first.removeprefix(marker)).resolve() == SHIPPED


def test_the_examples_load_together_with_no_environment_at_all() -> None:
    config = load([ROOT], {}, look=False)
    assert sorted(config.functions) == [
        *("math_reward", "pytest_reward", "reward_model", "shell", "teacher", "web_search")
    ]
    assert config.server.host == "127.0.0.1" and config.server.token == ""


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("server: {port: 80}", True),
        ('server: {port: "${PORT:-80}"}', True),
        ("server: {prot: 80}", False),
        ("server: {port: 70000}", False),
        ("functions: {f: {runtime: exec, timeout: 30s}}", True),
        ("functions: {f: {runtime: exec, timeout: 30}}", False),
        ("functions: {f: {runtime: exec, sandbox: {memory: 512Mi}}}", True),
        ("functions: {f: {runtime: exec, sandbox: {memory: lots}}}", False),
        ("functions: {f: {runtime: exec, cost: {cpu: {min: 1, max: 2}, gpu: {choices: [1]}, x: 1}}}", True),
        ("functions: {f: {runtime: exec, cost: {cpu: 0}}}", False),
        ("functions: {f: {runtime: exec, model: {path: m, action: score}}}", False),
        ("functions: {f: {runtime: model}}", False),
    ],
)
def test_the_schema_tells_right_from_wrong(text: str, fits: bool) -> None:
    assert accepts(text) is fits
