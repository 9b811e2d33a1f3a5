"""Files of deploy/: configurations load, manifests fit each other and the image, the job's script runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli.serve import init
from gateway.config.load import load
from tests.deploy.metrics import DEPLOY
from tests.house.source import ROOT

ENVIRONMENT = {"TANGRAM_TOKEN": "t" * 32, "TANGRAM_IMAGE": "sandbox:1", "TANGRAM_STATE": "/nowhere"}
CONFIGURATIONS = sorted(path for path in DEPLOY.rglob("tangram.yaml"))
BASE, EXAMPLE = DEPLOY / "kustomize" / "base", DEPLOY / "kustomize" / "overlays" / "example"
COMMAND_S = 300


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: str(path.parent.name))
def test_every_configuration_loads(path: Path) -> None:
    config = load([path], ENVIRONMENT)
    assert {"shell", "pytest_reward"} <= set(config.functions)


def test_the_overlay_adds_its_functions_to_those_of_the_base() -> None:
    config = load([BASE / "tangram.yaml", EXAMPLE / "functions.yaml"], ENVIRONMENT)
    assert {"shell", "build"} <= set(config.functions)


def test_the_steps_of_systemd_put_the_state_into_the_units_directory(tmp_path: Path) -> None:
    (edit,) = re.findall(r"^(sed -i .*) /etc/tangram/tangram\.yaml$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    unit = (DEPLOY / "systemd" / "tangram-gateway.service").read_text()
    (directory,) = re.findall(r"^StateDirectory=(\S+)$", unit, re.MULTILINE)
    assert init.callback is not None
    init.callback(tmp_path, as_json=True)
    subprocess.run([*shlex.split(edit), tmp_path / "tangram.yaml"], check=True, timeout=COMMAND_S)
    assert load([tmp_path], {}, look=False).server.state_dir == Path("/var/lib", directory)


def test_drains_are_shorter_than_what_waits_for_them() -> None:
    unit = (DEPLOY / "systemd" / "tangram-gateway.service").read_text()
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    (gateway,) = documents(DEPLOY / "compose" / "compose.yaml")[0]["services"].values()
    (workload,) = documents(BASE / "gateway.yaml")
    graces = {
        "systemd": (int(patience), ROOT / "tangram.yaml"),
        "compose": (int(gateway["stop_grace_period"].removesuffix("s")), DEPLOY / "compose" / "tangram.yaml"),
        "kustomize": (workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], BASE / "tangram.yaml"),
    }
    for name, (grace_s, path) in graces.items():
        assert load([path], ENVIRONMENT).server.drain_grace_s < grace_s, name


def test_the_unit_leaves_what_runs_to_the_next_gateway() -> None:
    unit = (DEPLOY / "systemd" / "tangram-gateway.service").read_text().splitlines()
    assert {"KillMode=process", "StateDirectoryMode=0700", "Restart=always"} <= set(unit)


def test_compose_and_the_stateful_set_fit_the_image() -> None:
    image = (ROOT / "Dockerfile").read_text()
    exposed = set(re.search(r"^EXPOSE (.*)$", image, re.MULTILINE)[1].split())  # type: ignore[index]
    (gateway,) = documents(DEPLOY / "compose" / "compose.yaml")[0]["services"].values()
    assert {port.rpartition(":")[2] for port in gateway["ports"]} == exposed
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    (workload,) = documents(BASE / "gateway.yaml")
    pod = workload["spec"]["template"]["spec"]
    mine, engine = pod["containers"]
    assert {str(port["containerPort"]) for port in mine["ports"]} == exposed
    assert workload["spec"]["replicas"] == 1 and not mine["securityContext"]["allowPrivilegeEscalation"]
    claimed = {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    volumes = {volume["name"] for volume in pod["volumes"]} | claimed
    assert {mount["name"] for each in (mine, engine) for mount in each["volumeMounts"]} == volumes
    state = [
        mount["mountPath"] for each in (mine, engine) for mount in each["volumeMounts"] if mount["name"] == "state"
    ]
    assert set(state) == {str(load([BASE / "tangram.yaml"], ENVIRONMENT).server.state_dir)}


def test_the_training_cluster_calls_the_service_with_a_token_and_asks_ray_for_one() -> None:
    (cluster,) = documents(DEPLOY / "kuberay" / "raycluster.yaml")
    (service,) = documents(BASE / "service.yaml")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    address = f"http://{service['metadata']['name']}.tangram.svc:{service['spec']['ports'][0]['port']}"
    for group in groups:
        assert group["template"]["metadata"]["labels"]["tangram-client"] == "true"
        (container,) = group["template"]["spec"]["containers"]
        given = {each["name"]: each.get("value") for each in container["env"]}
        assert given["TANGRAM_SERVER"] == address and given["RAY_AUTH_MODE"] == "token"
        assert given.keys() >= {"TANGRAM_TOKEN", "RAY_AUTH_TOKEN"}


def test_manifests_and_the_pods_of_the_training_cluster_are_of_kubernetes_own_schemas() -> None:
    """What is no field of Kubernetes' is refused: a word that is spelt wrong would be dropped in silence."""
    schemas = pytest.importorskip("kubernetes_validate")
    (cluster,) = documents(DEPLOY / "kuberay" / "raycluster.yaml")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            **each["template"],
            "metadata": {"name": "p", **each["template"]["metadata"]},
        }
        for each in groups
    ]
    manifests = [each for name in ("gateway", "network", "service") for each in documents(BASE / f"{name}.yaml")]
    for each in (*manifests, *pods):
        schemas.validate(each, schemas.latest_version(), strict=True)
    wrong = {**pods[0], "spec": {**pods[0]["spec"], "containerz": []}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, schemas.latest_version(), strict=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubectl_renders_the_overlay() -> None:
    done = subprocess.run(["kubectl", "kustomize", EXAMPLE], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr
    rendered = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert set(rendered) == {"ConfigMap", "Service", "StatefulSet", "NetworkPolicy"}
    labels = rendered["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()
    assert rendered["Service"]["spec"]["selector"].items() <= labels
    assert rendered["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels
    callers = [part for each in rendered["NetworkPolicy"]["spec"]["ingress"] for part in each["from"]]
    assert callers[0]["podSelector"]["matchLabels"] == {"tangram-client": "true"}
    assert set(rendered["ConfigMap"]["data"]) == {"tangram.yaml", "functions.yaml"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "tangram-gateway.service").read_text()
    (tmp_path / "tangram-gateway.service").write_text(unit.replace("/opt/tangram/bin/tangram", "/bin/true"))
    words = ["systemd-analyze", "verify", str(tmp_path / "tangram-gateway.service")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S)
    ours = [line for line in done.stderr.splitlines() if "tangram-gateway.service" in line]
    assert not ours


@pytest.mark.slow
def test_the_job_has_a_gateway_while_its_command_runs_and_its_status(tmp_path: Path) -> None:
    tangram = tmp_path / "tangram"
    tangram.write_text(f'#!/bin/sh\nexec {sys.executable} -m gateway "$@"\n')
    tangram.chmod(stat.S_IRWXU)
    configuration = (DEPLOY / "slurm" / "tangram.yaml").read_text()
    # No sandbox is made here; where bubblewrap is not installed, the gateway shall serve nevertheless.
    plain = "provider: plain\n  plain_as_root: true"
    (tmp_path / "tangram.yaml").write_text(configuration.replace("provider: process", plain))
    asked = (
        "import os, urllib.request as r; "
        "q = r.Request(os.environ['TANGRAM_SERVER'] + '/v1/functions', "
        "headers={'Authorization': 'Bearer ' + os.environ['TANGRAM_TOKEN']}); "
        "print(r.urlopen(q, timeout=30).read().decode()); raise SystemExit(7)"
    )
    done = subprocess.run(
        ["bash", DEPLOY / "slurm" / "rollouts.sbatch", sys.executable, "-c", asked],
        cwd=tmp_path,
        env=os.environ | {"TANGRAM": str(tangram), "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "12"},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 7, done.stderr
    assert '"shell"' in done.stdout
    assert "drained" in (tmp_path / "tangram-12" / "serve.log").read_text()


def test_a_job_without_a_command_is_told_how_it_is_used(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", DEPLOY / "slurm" / "rollouts.sbatch"], cwd=tmp_path, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert done.returncode == 2 and "usage" in done.stderr and not list(tmp_path.iterdir())
