"""The command line in this process."""

from __future__ import annotations

from tests.tangram.cli.conftest import tangram

__all__ = ["tangram"]
