"""Frameworks that an adapter needs and may not find."""

from __future__ import annotations


def missing(adapter: str, package: str, error: ImportError) -> ImportError:
    """Return the error of an adapter whose framework cannot be imported; it names the extra that brings it."""
    extra = adapter.replace("_", "-")
    return ImportError(f"tangram.adapters.{adapter} needs {package} ({error}): pip install 'tangram-client[{extra}]'")
