"""Whatever the YAML holds, loading it gives a configuration or InvalidConfig, and nothing else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import ConfigSource, GatewayConfig, build
from gateway.config.schema import MAPS, SECTIONS, schema
from manager.errors import InvalidConfig

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
