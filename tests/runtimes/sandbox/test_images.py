"""The name of an image becomes a part of a request to the engine: nothing else than a name may be one."""

from __future__ import annotations

import pytest

from manager.errors import InvalidConfig
from runtimes.sandbox.spec import require_image_name


@pytest.mark.parametrize(
    "image",
    [
        "busybox",
        "tangram-base:bookworm",
        "library/python:3.12-slim",
        "localhost:5000/swebench/sweb.eval.x86_64.astropy__astropy-1776:latest",
        "registry.example/a__b/c-d:v1.0_RC",
        "[::1]:5000/a:b",
        "tangram/snapshot:0123456789ab",
        "busybox@sha256:" + "a" * 64,
        "registry.example:5000/a/b:c@sha256:" + "0" * 64,
        "sha256:" + "a" * 64,
        "a" * 64,
    ],
)
def test_a_name_is_taken(image: str) -> None:
    require_image_name(image)


@pytest.mark.parametrize(
    "image",
    [
        "",
        "../containers/tangram-0123",
        "swebench/../../containers/x",
        "a/./b",
        "a//b",
        "/etc/passwd",
        "a/",
        "a?force=1",
        "a#b",
        "a%2e%2e/b",
        "a b",
        "a\n",
        "a\0b",
        "ü",
        "..",
        "a:../b",
        "a@sha256:../b",
        "x" * 2000,
        "a-" * 500 + "!",
    ],
)
def test_what_could_lead_to_another_route_of_the_engine_is_refused(image: str) -> None:
    with pytest.raises(InvalidConfig, match="is no name of an image"):
        require_image_name(image)
