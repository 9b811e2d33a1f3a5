"""How a setting is declared: once, on the frozen value that is passed whole to who needs it.

    max_queued: Annotated[int, Setting("most waiting actions; beyond it 429", ge=1)] = 4096

The configuration derives its check, its JSON Schema and its reference page from that; the unit of a field's name
(``timeout_s``, ``memory_bytes``) says how it is written (``timeout: 30s``, ``memory: 512Mi``). A field without a
`Setting` cannot be set by the YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Setting:
    """What is said of a field: its meaning in one line, and its bounds."""

    meaning: str = ""
    #: Its key in the YAML; by default the field's name without its unit.
    key: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    pattern: str | None = None
    #: What fits the pattern, in words that go on after "must be".
    words: str = ""
    min_length: int | None = None
    #: Whether a number may be written where text is wanted: a user's id.
    number_too: bool = False
    #: Whether the keys of the field's own settings stand beside the others, without a key for the field itself.
    inline: bool = False

    def __post_init__(self) -> None:
        if (self.pattern is None) == bool(self.words):
            raise TypeError("a pattern and its words are given together")


@cache
def settings_of(noun: type) -> tuple[tuple[str, Any, Setting], ...]:
    """Return the name, the annotation and the `Setting` of each field of a dataclass that has one.

    Any: annotations have no common type.
    """
    hints = get_type_hints(noun, include_extras=True)
    return tuple(
        (field.name, hints[field.name], said)
        for field in fields(noun)
        for said in getattr(hints[field.name], "__metadata__", ())[-1:]
        if isinstance(said, Setting)
    )
