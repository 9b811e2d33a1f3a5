"""Files of trajectories on a node: the same routes, the same answers, whatever comes in between."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile

import pytest

from tests.cluster.conftest import MakeNode, StartGateway
from tests.faults.world import HTTP

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]

LARGE = random.Random(3).randbytes(5 * 2**20 + 3)


def test_files_trees_and_errors_travel_between_a_client_and_a_node(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    make_node(gateway, "n1").start()
    gateway.until_state("n1", "ready")
    made = gateway.ended(gateway.submit("there", "mkdir -p out && echo here > out/said", trajectory="t"))
    assert made["node"] == "n1", made
    place = f"{gateway.url}/v1/trajectories/t"
    with gateway.client() as client:
        files = client.trajectory("t")
        files.upload("large", LARGE)
        digest = gateway.ended(gateway.submit("there", "sha256sum < large", trajectory="t"))
        assert digest["result"]["stdout"].split()[0] == hashlib.sha256(LARGE).hexdigest()
        assert files.download("large") == LARGE
        assert files.download("out/said") == b"here\n"
    listed = HTTP.get(f"{place}/files", params={"path": ".", "list": "true"}).json()["files"]
    assert {entry["path"].rsplit("/", 1)[-1] for entry in listed} >= {"large", "out"}
    missing = HTTP.get(f"{place}/files", params={"path": "none"})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found"), missing.text
    packed = HTTP.get(f"{place}/archive", params={"path": "out"})
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as tar:
        said = tar.extractfile(next(name for name in tar.getnames() if name.endswith("said")))
        assert said is not None and said.read() == b"here\n"
    unpacked = HTTP.put(f"{place}/archive", params={"path": "copy"}, content=packed.content)
    assert unpacked.status_code == 201, unpacked.text
    found = gateway.ended(gateway.submit("there", "cat copy/said", trajectory="t"))
    assert found["result"]["stdout"] == "here\n"
