"""Nouns: dataclasses that are made for each action and frozen for the type checker alone.

A frozen dataclass guards each of its fields while it is made, which takes three times as long as the rest. mypy reads
all of this repository, tests included, and refuses an assignment to a field of a noun as it does to a frozen one's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

Made = TypeVar("Made")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def noun(declared: type[Made]) -> type[Made]:
    """Return a dataclass with slots whose fields are given by name, once."""
    return dataclass(slots=True, kw_only=True)(declared)
