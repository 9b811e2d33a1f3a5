"""Configuration: loaded whole or refused with every mistake at its line."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import EXTRAS, ConfigSource, GatewayConfig, build, load
from gateway.config.schema import MAPS, SECTIONS, ClusterConfig, schema
from gateway.config.yaml import DEPTH_MAX, NODES_MAX, TEXT_LIMIT_BYTES, YamlDocument, parse, show_path
from manager.action import Amdahl, EfficiencyTable, UnitSet
from manager.config import TaskSpec
from manager.errors import InvalidConfig, Reason, Unsupported
from manager.function import Background, Network, SandboxSpec, Warm
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from runtimes.kinds import KINDS
from runtimes.sandbox.provider import make_provider

#: The example of the design, section 5.
DESIGN = """\
version: 1
resources:                       # besides the machine's own cpu, memory and gpu, which are discovered
  google_search: {kind: quota, limit: 100, period: 1s, burst: 20}
  pdf_parser:    {kind: concurrency, limit: 16}
tasks:
  default: {weight: 1, max_queued: 4096}
functions:
  shell:
    runtime: exec                # exec | pytest | handler | model | api
    sandbox: {image: "python:3.11-slim", memory: 512Mi, network: none, user: "1000", pids: 256, idle_ttl: 30m}
    cost: {cpu: 1}
    timeout: 60s                 # execution only
    queue_timeout: 10m           # waiting only
  unit_tests:
    runtime: pytest
    cost: {cpu: {min: 1, max: 32}}      # or {choices: [1, 2, 4, 8]}
    elasticity: {key: cpu, serial_fraction: 0.05}    # or a table {1: 1.0, 2: 0.93}; or learned
    duration: {profile: learned, key: suite, initial: 30s}
  reward:
    runtime: model
    model: {path: models/reward, action: score}      # score | logprobs | generate | embed
    cost: {gpu: {choices: [1, 2, 4, 8]}}
    elasticity: {key: gpu, table: {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.65}}
  search:
    runtime: api
    request:
      method: GET
      url: "https://api.example.com/search?q={query}"
      headers: {Authorization: "Bearer ${secret:search_key}"}
    cost: {google_search: 1}
    retry: {max_attempts: 3, backoff: 1s, jitter: full, on: [429, 503, timeout]}
  math_reward:
    runtime: handler
    handler: handler:score       # def score(event, context): imported once in a warm container
    concurrency: {per_instance: 1}
    scale: {min: 1, max: 8, idle: 5m}
    idempotent: true             # may be run again after a node or the gateway is lost
"""
ENGINES = """\
functions:
  own: {runtime: model, model: {path: models/reward, action: score}}
  theirs: {runtime: model, model: {path: served, action: score, engine: {url: "http://127.0.0.1:8000"}}}
"""

SAFETENSORS = (2).to_bytes(8, "little") + b"{}"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with what the design's example points to."""
    (tmp_path / "handler.py").write_text("def score(event, context):\n    return 1.0\n")
    checkpoint = tmp_path / "models" / "reward"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(SAFETENSORS)
    return tmp_path


def loaded(directory: Path, text: str, env: Mapping[str, str] | None = None) -> GatewayConfig:
    file = directory / "tangram.yaml"
    file.write_text(text)
    return load([file], env or {})


def problems(directory: Path, text: str, env: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with the text, each as ``line: path: message``."""
    with pytest.raises(InvalidConfig) as caught:
        loaded(directory, text, env)
    listed = caught.value.detail["problems"]
    assert isinstance(listed, list)
    return [f"{each['line']}: {each['path']}: {each['message']}" for each in listed]


def functions(text: str) -> str:
    return "functions:\n" + text


def test_the_example_of_the_design_loads_verbatim(project: Path) -> None:
    config = loaded(project, DESIGN)
    assert list(config.functions) == ["shell", "unit_tests", "reward", "search", "math_reward"]
    shell, tests, reward, search, handler = config.functions.values()
    assert shell.sandbox is not None
    assert (shell.sandbox.memory_bytes, shell.sandbox.idle_ttl_s) == (512 * 2**20, 1800.0)
    assert (shell.sandbox.network, shell.timeout_s, shell.queue_timeout_s) == (Network.NONE, 60.0, 600.0)
    assert (tests.cost, tests.key, tests.elasticity) == ({"cpu": UnitSet.span(1, 32)}, "cpu", Amdahl(0.05))
    assert (tests.duration.key, tests.duration.initial_s) == ("suite", 30.0)
    assert reward.cost == {"gpu": UnitSet.of((1, 2, 4, 8))}
    assert reward.elasticity == EfficiencyTable(((1, 1.0), (2, 0.9), (4, 0.8), (8, 0.65)))
    assert reward.model is not None and reward.model.path == project / "models" / "reward"
    assert search.request is not None and search.request.headers == {"Authorization": "Bearer ${secret:search_key}"}
    assert (search.retry.on, search.retry.on_status) == ((Reason.TIMEOUT,), (429, 503))
    assert handler.handler is not None and handler.handler.directory == project
    assert (handler.handler.instances_min, handler.handler.instances_max, handler.handler.idle_s) == (1, 8, 300.0)
    assert handler.idempotent
    assert config.resources == {
        "google_search": QuotaSpec(limit=100, period_s=1.0, burst=20),
        "pdf_parser": ConcurrencySpec(limit=16),
    }
    assert config.tasks == {"default": TaskSpec()}


def test_a_directory_is_its_server_file_and_its_functions(tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text("server: {port: 0}\n")
    for name in ("a", "b"):
        (tmp_path / "functions" / name).mkdir(parents=True)
        (tmp_path / "functions" / name / "function.yaml").write_text(functions(f"  {name}: {{runtime: exec}}\n"))
    config = load([tmp_path], {})
    assert (config.server.port, sorted(config.functions), len(config.files)) == (0, ["a", "b"], 3)
    assert str(config.origins["b"]) == f"{tmp_path}/functions/b/function.yaml:2"


@pytest.mark.promise("Mistakes in a configuration are reported with file, line and remedy, all at once.")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("serverr: {}", "1: serverr: unknown key 'serverr'; did you mean 'server'?"),
        ("server:\n  prot: 1", "2: server.prot: unknown key 'prot'; did you mean 'port'?"),
        ("server: {drain_grace_s: 1}", "did you mean 'drain_grace'?"),
        ("functions: {f: {runtime: exec, image: x}}", "unknown key 'image'; did you mean 'sandbox.image'?"),
        ("functions: {f: {runtime: exec, cpu: 2}}", "unknown key 'cpu'; did you mean 'cost.cpu'?"),
        (
            "server: {facades: {sandboxfusion: {languages: {pyhton: f}}}}\nfunctions: {f: {runtime: exec}}",
            "'pyhton' is none of 'python', 'pytest', 'bash', 'nodejs' or 'cpp'; did you mean 'python'?",
        ),
        (
            "functions:\n  f:\n    runtime: exec\n    sandbox: {imge: x}",
            "4: functions.f.sandbox.imge: unknown key 'imge'",
        ),
        ("functions: {f: {runtime: exec, handler: 'a:b'}}", "unknown key 'handler'; known here: cost,"),
        (
            "functions: {f: {runtime: modl}}",
            f"'modl' is none of {', '.join(KINDS)}; did you mean 'model'?",
        ),
        ("functions: {f: {cost: {cpu: 1}}}", "functions.f: runtime is required"),
        (
            "functions: {f: {runtime: exec, input: {properties: {n: {type: strng}}}}}",
            "functions.f.input: is no JSON Schema (draft 2020-12): $.properties.n.type: 'strng' is not valid",
        ),
        (
            "functions: {f: {runtime: exec, result: {items: {$ref: '#/$defs/x'}}}}",
            "functions.f.result: is no JSON Schema that stands alone: $ref '#/$defs/x' leads nowhere in it",
        ),
        ("functions: {f: {runtime: exec, timeout: 60}}", "functions.f.timeout: 60 is no duration"),
        (
            "functions: {f: {runtime: exec, timeout: 999999999999d}}",
            "'999999999999d' is no duration: a number has at most 9 digits before the point and 6 behind it",
        ),
        ("server: {token: ab}", "a token has 16 to 4096 visible ASCII characters, and no spaces; this one has 2"),
        ("server: {token: 'üüüüüüüüüüüüüüüüüüüü'}", "and no spaces; this one has others: openssl rand -hex 32"),
        (
            "functions: {f: {runtime: exec, cost: {cpu: [1]}}}",
            "write a count, {min: ..., max: ...} or {choices: [...]}",
        ),
        ("functions: {f: {runtime: exec, cost: {cpu: {min: 4, max: 2}}}}", "min 4 is more than max 2"),
        ("functions: {f: {runtime: exec, cost: {cpu: true}}}", "a number is needed, not true or false"),
        ("functions: {f: {runtime: exec, cost: {cpuu: 1}}}", "'cpuu' is no resource; did you mean 'cpu'?"),
        ("functions: {f: {runtime: exec, cost: {memory: 1}}}", "write sandbox.memory"),
        ("functions: {f: {runtime: exec, sandbox: {memory: 1Mi}}}", "sandbox.memory: must be at least 16Mi"),
        ("functions: {f: {runtime: exec, sandbox: {env: {'A=B': x}}}}", "must be the name of a variable, without ="),
        ("functions: {f: {runtime: exec, sandbox: {env: {'': x}}}}", "must be the name of a variable"),
        ('functions: {f: {runtime: exec, sandbox: {env: {A: "x\\0"}}}}', "sandbox.env.A: must be text without NUL"),
        ("functions: {f: {runtime: handler, handler: reward}}", "must be module:callable, for example reward:score"),
        ("functions: {f: {runtime: exec, elasticity: {key: gpu}}}", "elasticity.key: 'gpu' is not in the cost"),
        ("functions: {f: {runtime: exec, retry: {max_attempts: 2}}}", "say on what it is tried again"),
        ("functions: {f: {runtime: exec, retry: {on: [503]}}}", "by api functions only"),
        ("functions: {f: {runtime: exec, retry: {on: [tmeout]}}}", "retry.on[0]: 'tmeout' is neither a reason"),
        ("functions: {f: {runtime: api, request: {url: 'http://{host}/'}}}", "host is fixed"),
        ("functions: {f: {runtime: exec, duration: {profile: declared}}}", "a declared duration needs initial"),
        ("functions: {'a b': {runtime: exec}}", "'a b' is no name"),
        ("functions: {1: {runtime: exec}}", "1 is no name"),
        ("resources: {cpu: {kind: concurrency, limit: 1}}", "'cpu' is the machine's own"),
        ("resources: {a: {kind: quota, limit: 1}}", "resources.a.period: is required"),
        ("server: {port: 8090, grpc_port: 8090}", "server.grpc_port: 8090 is port already: choose another"),
        ("server: {port: 8081}", "8081 is port already"),
        (
            "server: {facades: {mcp: {functions: [shel]}}}\nfunctions: {shell: {runtime: exec}}",
            "server.facades.mcp.functions: 'shel' is no function; did you mean 'shell'?",
        ),
        ("tasks: {t: {caps: {gpuu: 1}}}", "tasks.t.caps.gpuu: 'gpuu' is no resource; did you mean 'gpu'?"),
        ("scheduler: {policy: adaptiv}", "did you mean 'adaptive'?"),
        ("scheduler: {policy: {cpuu: price}}", "'cpuu' is no resource; did you mean 'cpu'?"),
        ("scheduler: {policy: price, objective: step}", "step is an objective of the policy adaptive"),
        ("scheduler: {objective: stepp}", "'stepp' is none of 'act' or 'step'; did you mean 'step'?"),
        ("server: {host: 0.0.0.0}", "or server.clear_text: true"),
        ("server: {host: 0.0.0.0, auth: none}", "server.auth is none"),
        ("server: {token_file: nowhere}", "cannot be read"),
        ("version: 2", "version: 2 is none of 1"),
        ("[]", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_the_remedy(tmp_path: Path, text: str, expected: str) -> None:
    assert any(expected in each for each in problems(tmp_path, text)), problems(tmp_path, text)


@pytest.mark.parametrize(
    ("server", "place", "extra"),
    [
        ("facades: {mcp: {functions: [f]}}", "server.facades.mcp", "mcp"),
        ("traces: {endpoint: 'http://127.0.0.1:4318/v1/traces'}", "server.traces.endpoint", "otel"),
    ],
)
def test_what_needs_an_extra_that_is_not_installed_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, place: str, extra: str
) -> None:
    text = f"server: {{{server}}}\nfunctions: {{f: {{runtime: exec}}}}"
    loaded(tmp_path, text)
    monkeypatch.setitem(EXTRAS, extra, ("no-such-distribution",))
    (told,) = problems(tmp_path, text)
    assert f"{place}: needs no-such-distribution: pip install 'tangram-gateway[{extra}]'" in told


async def test_a_gateway_of_models_and_apis_makes_no_sandboxes_and_takes_no_function_that_needs_one(
    tmp_path: Path,
) -> None:
    search = "search: {runtime: api, request: {url: 'http://127.0.0.1:9/'}}"
    text = f"sandbox: {{provider: none}}\nfunctions:\n  {search}\n"
    config = loaded(tmp_path, text)
    told = problems(tmp_path, text + "  shell: {runtime: exec}\n")
    assert told == ["4: functions.shell: it needs sandboxes, and sandbox.provider is none"]
    provider = make_provider(replace(config.sandbox.provider, state_dir=tmp_path))
    with pytest.raises(Unsupported, match="auto takes Docker or bubblewrap"):
        await provider.create(SandboxSpec(), name="s", labels={}, mounts={})


def test_all_problems_are_told_at_once_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("functions: {f: {runtime: exec, timout: 3s}, g: {runtime: nope}}")
    (tmp_path / "b.yaml").write_text("functions: {f: {runtime: exec}}\nserver: {port: x}")
    with pytest.raises(InvalidConfig) as caught:
        load([tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"], {})
    message = caught.value.message
    for part in ("a.yaml:1: functions.f.timout", "functions.g", "defined twice, first at", "b.yaml:2: server.port"):
        assert part in message
    assert "c.yaml:1: no such file" in message


def test_a_section_of_the_server_is_given_in_one_file_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("node: {name: x}")
    with pytest.raises(InvalidConfig, match=r"is given in two files, first at .*a\.yaml:1"):
        load([tmp_path / "a.yaml", tmp_path / "b.yaml"], {})


def test_the_only_elastic_resource_is_the_key(tmp_path: Path) -> None:
    one = loaded(tmp_path, functions("  f: {runtime: exec, cost: {cpu: {min: 1, max: 4}}}")).functions["f"]
    assert (one.key, one.elasticity) == ("cpu", None)
    two = "  f: {runtime: exec, cost: {cpu: {min: 1, max: 4}, gpu: {choices: [1, 2]}}}"
    assert "say which is the key" in problems(tmp_path, functions(two))[0]


@pytest.mark.parametrize(
    ("server", "function", "refused"),
    [
        ("{}", "{user: root}", "functions.f.sandbox.user: the user 'root' is root"),
        ("{}", "{user: 0}", "functions.f.sandbox.user: the user '0' is root"),
        ("{users: [1000]}", "{user: 1001}", "functions.f.sandbox.user: the user '1001' is not among"),
        ("{user: 1000, users: [root]}", "{}", "sandbox.user: the user '1000' is not among"),
        ("{users: [root]}", "{}", ""),
        ("{user: root}", "{}", "sandbox.user: the user 'root' is root"),
        ("{users: [1000, root]}", "{user: root}", ""),
        ("{}", "{user: root, users: [root]}", ""),
        ("{}", "{user: alice}", ""),
    ],
)
def test_a_sandboxs_user_is_one_of_its_users(tmp_path: Path, server: str, function: str, refused: str) -> None:
    text = f"sandbox: {server}\n" + functions(f"  f: {{runtime: exec, sandbox: {function}}}")
    if refused:
        assert any(refused in each and "list it: sandbox.users: [" in each for each in problems(tmp_path, text))
    else:
        assert loaded(tmp_path, text).functions["f"].sandbox is not None


def test_a_sandbox_takes_the_servers_defaults_for_what_it_leaves_out(tmp_path: Path) -> None:
    text = (
        "sandbox: {image: base, memory: 1Gi, warm: {min: 1, max: 2}}\n"
        "functions: {f: {runtime: exec, sandbox: {memory: 2Gi, user: 1001, background: run}}}\n"
    )
    sandbox = loaded(tmp_path, text).functions["f"].sandbox
    assert sandbox == SandboxSpec(
        image="base", memory_bytes=2 * 2**30, user="1001", background=Background.RUN, warm=Warm(min=1, max=2)
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, "no handler.py"),
        ("def scores(event, context): ...", "has no 'score'; it defines scores"),
        ("def score(:", "handler.py:1 is not Python"),
    ],
)
def test_a_handler_that_cannot_be_called_is_refused_without_running_it(
    tmp_path: Path, source: str | None, expected: str
) -> None:
    if source is not None:
        (tmp_path / "handler.py").write_text(source)
    (problem,) = problems(tmp_path, functions("  f: {runtime: handler, handler: 'handler:score'}"))
    assert expected in problem


@pytest.mark.parametrize(
    "source",
    [
        "async def score(event, context): ...",
        "score = print",
        "from m import score",
        "from m import x as score",
        "from m import *",
        "if True:\n  def score(e, c): ...",
        "try:\n  import m\nexcept ImportError:\n  score = None",
        "raise SystemExit\nclass score: ...",
    ],
)
def test_a_handler_may_be_bound_in_any_way_at_the_top_level(tmp_path: Path, source: str) -> None:
    (tmp_path / "handler.py").write_text(source)
    config = loaded(tmp_path, functions("  f: {runtime: handler, handler: 'handler:score'}"))
    assert config.functions["f"].handler is not None


def test_a_checkpoint_that_cannot_be_loaded_is_refused_with_the_remedy(tmp_path: Path) -> None:
    text = functions("  f: {runtime: model, model: {path: m, action: score}}")
    with pytest.raises(InvalidConfig, match="is no checkpoint"):
        loaded(tmp_path, text)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    for data, expected in (
        (None, r"holds no \*.safetensors"),
        (b"PK\x03\x04 and more", "is a pickle in spite of its name"),
    ):
        if data is not None:
            (tmp_path / "m" / "model.safetensors").write_bytes(data)
        with pytest.raises(InvalidConfig, match=expected):
            loaded(tmp_path, text)


def test_what_a_handler_requires_is_checked_read_from_files_and_part_of_the_revision(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("def score(event, context):\n    return 1.0\n")
    (tmp_path / "needs.txt").write_text("tiny==1.0\n")
    text = "  f: {runtime: handler, handler: 'handler:score', requirements: [other>=2, -r needs.txt]}"
    (problem,) = problems(tmp_path, functions(text))
    assert "functions.f.requirements: it has requirements, and this gateway takes none" in problem
    text += "\nsandbox: {requirements: {find_links: wheels}}"
    first = loaded(tmp_path, functions(text)).functions["f"]
    assert first.handler is not None and first.handler.requirements == ("other>=2", "tiny==1.0")
    (tmp_path / "sandbox.yaml").write_text("version: 1\nsandbox: {requirements: {find_links: wheels}}\n")
    assert load([tmp_path / "sandbox.yaml"], {}).sandbox.requirements.find_links == tmp_path / "wheels"
    (tmp_path / "needs.txt").write_text("tiny==1.1\n")
    second = loaded(tmp_path, functions(text)).functions["f"]
    assert first.revision != second.revision
    (problem,) = problems(tmp_path, functions(text.replace("other>=2", "--pre")))
    assert "requirements" in problem and "of pip's options only -r FILE" in problem


def test_without_looking_handlers_and_checkpoints_may_be_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text(functions("  f: {runtime: model, model: {path: m, action: score}}"))
    assert load([tmp_path], {}, look=False).functions["f"].cost == {"gpu": UnitSet.fixed(1)}


def test_the_revision_changes_with_the_definition_and_with_the_handlers_source(project: Path) -> None:
    def revisions() -> dict[str, str]:
        return {name: each.revision for name, each in load([project], {}).functions.items()}

    (project / "tangram.yaml").write_text(DESIGN)
    first = revisions()
    assert revisions() == first
    (project / "part.py").write_text("X = 1\n")
    second = revisions()
    assert {name for name in first if first[name] != second[name]} == {"math_reward"}
    (project / "tangram.yaml").write_text(DESIGN.replace("pids: 256", "pids: 257"))
    third = revisions()
    assert {name for name in second if second[name] != third[name]} == {"shell"}


def test_paths_begin_at_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("open-sesame-open\n")
    config = loaded(tmp_path, "server: {host: 0.0.0.0, clear_text: true, token_file: secret, state_dir: state}")
    assert (config.server.token, config.server.state_dir) == ("open-sesame-open", tmp_path / "state")
    assert "open-sesame-open" not in repr(config)


def test_a_policy_is_chosen_for_all_or_by_resource(tmp_path: Path) -> None:
    text = "scheduler: {policy: {cpu: paper, gpu: {name: fixed, options: {dop: 2}}}}"
    policies = loaded(tmp_path, text).manager_spec(()).scheduler.policies
    assert {kind: (each.name, dict(each.options)) for kind, each in policies.items()} == {
        "default": ("price", {}),
        "cpu": ("paper", {}),
        "gpu": ("fixed", {"dop": 2.0}),
    }
    assert loaded(tmp_path, "scheduler: {policy: paper}").scheduler.policies["default"].name == "paper"


def test_an_external_engine_beside_own_models_is_refused_where_there_may_be_gpus(tmp_path: Path) -> None:
    reward = tmp_path / "models" / "reward"
    reward.mkdir(parents=True)
    (reward / "config.json").write_text("{}")
    (reward / "model.safetensors").write_bytes(SAFETENSORS)
    (problem,) = problems(tmp_path, ENGINES)
    assert "functions.theirs.model.engine: an external engine needs devices of its own" in problem and "own" in problem
    (tmp_path / "tangram.yaml").write_text(ENGINES + "node: {devices: {kind: cpu}}\n")
    assert set(load([tmp_path], {}).functions) == {"own", "theirs"}, "arenas of cpu devices are in nobody's way"
    (tmp_path / "tangram.yaml").write_text("".join(line for line in ENGINES.splitlines(True) if "own:" not in line))
    assert set(load([tmp_path], {}).functions) == {"theirs"}


def test_machines_of_ray_need_an_address_to_dial_and_names_of_their_own(tmp_path: Path) -> None:
    ray = {"address": "head:6379", "labels": {"pool": "*"}, "reserve_cpus": None, "at_end": "release"}
    found = loaded(tmp_path, f"version: 1\ncluster: {json.dumps({'ray': ray})}\n").cluster
    assert found is not None and found.ray is not None
    assert (found.ray.address, found.ray.labels, found.ray.reserve_cpus) == ("head:6379", {"pool": "*"}, None)
    assert loaded(tmp_path, "version: 1\ncluster: {}\n").cluster == ClusterConfig(), (
        "without the section there is no Ray"
    )
    refused: tuple[tuple[dict[str, object], str], ...] = (
        ({"listen": "0.0.0.0:8082", "ray": {}}, "needs advertise"),
        ({"ray": {"name": "node"}}, "names every machine alike"),
        ({"ray": {"reserve_cpus": -1}}, "reserve_cpus"),
    )
    for section, told in refused:
        with pytest.raises(InvalidConfig, match=told):
            loaded(tmp_path, f"version: 1\ncluster: {json.dumps(section)}\n")


ROOT = Path(__file__).resolve().parents[3]

SHIPPED = ROOT / "gateway" / "config" / "schema.json"

EXAMPLES = [
    ROOT / "tangram.yaml",
    ROOT / "examples" / "models" / "tangram.yaml",
    *sorted(ROOT.glob("functions/*/function.yaml")),
]


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
    assert SHIPPED.read_text(encoding="utf-8") == written, "run: python -m scripts.reference"
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
    config = load([ROOT], {})
    assert sorted(config.functions) == ["math_reward", "pytest_reward", "shell", "web_search"]
    with_models = load([ROOT, ROOT / "examples" / "models"], {}, look=False)
    assert sorted(set(with_models.functions) - set(config.functions)) == ["reward_model", "teacher"]
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


DEFINITIONS: Any = schema()["$defs"]

KEYS = sorted({*SECTIONS, *MAPS, *(key for each in DEFINITIONS.values() for key in each.get("properties", ()))})

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(
        ["exec", "pytest", "handler", "model", "api", "auto", "container", "30s", "-1s", "1Gi", "x:y", ""]
    )
    | st.text(max_size=8)
)

names = st.sampled_from(KEYS) | st.sampled_from(["f", "cpu", "gpu", "min", "max"]) | st.text(max_size=5)

values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)

#: A document that is right but for one value somewhere, and documents that are wrong everywhere.
almost = st.builds(
    lambda key, value: {"functions": {"f": {"runtime": "exec", key: value}}}, st.sampled_from(KEYS), values
)

sections = st.builds(lambda name, value: {name: value}, st.sampled_from(sorted({*SECTIONS, *MAPS})), values)


@pytest.mark.slow
@given(almost | sections | values)
def test_a_document_is_a_configuration_or_is_refused(document: object) -> None:
    text = json.dumps(document)  # JSON is YAML
    with contextlib.suppress(InvalidConfig):
        assert isinstance(build([ConfigSource(path=Path("fuzz.yaml"), text=text)], {}), GatewayConfig)


FILE = Path("x.yaml")


def read(text: str, **env: str) -> YamlDocument:
    return parse(text, FILE, env)


def messages(text: str, **env: str) -> list[str]:
    return [str(problem) for problem in read(text, **env).problems]


def test_every_key_path_knows_its_line() -> None:
    document = read("a: 1\nb:\n  c:\n  - x\n  - {d: 2}\n")
    assert document.values == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    assert {show_path(path): place.line for path, place in document.positions.items()} == {
        "": 1,
        "a": 1,
        "b": 2,
        "b.c": 3,
        "b.c[0]": 4,
        "b.c[1]": 5,
        "b.c[1].d": 5,
    }


def test_scalars_are_those_of_yaml_1_2() -> None:
    values = read(
        "[on, yes, no, off, true, null, ~, 12, 0x1f, 0o17, 1.5, 1e3, 2024-01-01, 12:30, 'true', \"1\"]"
    ).values
    assert values == [
        *("on", "yes", "no", "off", True, None, None, 12, 31, 15, 1.5, 1000.0),
        *("2024-01-01", "12:30", "true", "1"),
    ]


def test_variables_are_replaced_and_what_they_hold_stays_text() -> None:
    document = read(
        "a: ${X}\nb: 'p${X:-d}q'\nc: ${Y:-8080}\nd: $${X}\ne: ${secret:key}\n${X}: 1\nf: ${E:-d}", X="12", E=""
    )
    assert document.values == {
        "a": "12",
        "b": "p12q",
        "c": "8080",
        "d": "${X}",
        "e": "${secret:key}",
        "${X}": 1,
        "f": "d",
    }
    assert not document.problems


def test_a_variable_that_is_not_defined_is_told_with_its_line() -> None:
    assert messages("a: 1\nb: ${NOPE}") == [
        "x.yaml:2: variable NOPE is not defined: set it, or give a default: ${NOPE:-...}"
    ]
    assert "is no variable" in messages("a: ${1x}")[0]


def test_a_key_that_is_given_twice_is_told_with_both_lines() -> None:
    assert messages("a: 1\nb: 2\na: 3") == ["x.yaml:3: key 'a' is given twice (first on line 1)"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "not YAML"),
        ("a: *b", "alias \\*b has no anchor"),
        ("a: &x [*x]", "cycle"),
        ("a: &x {b: {c: *x}}", "cycle"),
        ("a: !!python/object:os.system {}", "tag .* is not supported"),
        ("<<: {a: 1}", "merge keys"),
        ("{[1]: 2}", "a key must be a plain scalar"),
        ("a: &x [1]\n*x : 2", "a key must be a plain scalar"),
        ("a: 1\n---\nb: 2", "one document to a file"),
        ("\x00", "not YAML"),
        ("[" * 500_000, f"nested deeper than {DEPTH_MAX}"),
        ("#" * (TEXT_LIMIT_BYTES + 1), "larger than"),
    ],
)
def test_what_is_no_plain_bounded_document_is_refused(text: str, expected: str) -> None:
    document = read(text)
    assert document.problems
    assert re.search(expected, str(document.problems[0])), document.problems


def test_where_reading_stops_the_entries_before_it_are_kept() -> None:
    document = read("a: {x: 1}\nb: ${NOPE}\nb: 2\nc:\n  d: 1\n  e: [")
    assert document.values == {"a": {"x": 1}, "b": "${NOPE}"}
    assert [problem.position and problem.position.line for problem in document.problems] == [2, 3, 6]
    assert document.positions["a", "x"].line == 1


def test_an_anchor_may_be_given_anew_and_what_is_wrong_in_it_is_told_once() -> None:
    document = read("a: &x {k: 1, k: 2}\nb: [*x, *x]\nc: &x ${NOPE}\nd: *x")
    assert document.values == {"a": {"k": 1}, "b": [{"k": 1}, {"k": 1}], "c": "${NOPE}", "d": "${NOPE}"}
    assert [problem.position and problem.position.line for problem in document.problems] == [1, 3]


@pytest.mark.slow
def test_aliases_are_values_but_a_bomb_of_them_is_not() -> None:
    assert read("a: &x {k: 1}\nb: *x").values == {"a": {"k": 1}, "b": {"k": 1}}
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    assert f"more than {NODES_MAX} values" in messages(bomb)[0]


@pytest.mark.slow
@given(st.text(st.sampled_from("ab:-[]{}&*!|>'\"#%@`,? \n\t${}0.\u2028\ufeff"), max_size=60))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    document = read(text)
    assert document.problems or document.positions or document.values in ({}, None)
