"""The former place of the client works for one release, and says where the client is."""

from __future__ import annotations

import importlib
import sys

import pytest

import tangram


def test_the_former_place_gives_the_same_classes_with_a_warning() -> None:
    sys.modules.pop("gateway.client", None)
    with pytest.warns(DeprecationWarning, match="from tangram import Client"):
        former = importlib.import_module("gateway.client")
    assert [name for name in former.__all__ if getattr(former, name) is not getattr(tangram, name)] == []
    assert {"Client", "AsyncClient", "InvocationResult"} <= set(former.__all__)
