"""The command line in this process."""

from __future__ import annotations

from tests.tangram.cli.conftest import served, tangram

__all__ = ["served", "tangram"]
