"""Environments of real clients: what is asked of pip, and what is said when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.facades import client_environments
from bench.facades.client_environments import ClientFailed, client_environment

pytestmark = pytest.mark.slow


def test_a_comment_is_not_installed_and_a_failure_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_environments, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(client_environments, "CACHE", tmp_path / "cache")
    (tmp_path / "nobody.txt").write_text("# a comment\n--no-index\ntangram-no-such-distribution==1\n")
    with pytest.raises(ClientFailed, match="No matching distribution found for tangram-no-such-distribution") as failed:
        client_environment("nobody")
    assert "WARNING" not in str(failed.value)
    assert "Invalid requirement" not in str(failed.value)
