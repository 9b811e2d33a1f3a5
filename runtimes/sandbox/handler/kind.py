"""The kind handler: a Python function of the user's, imported once per warm instance."""

from __future__ import annotations

from runtimes.kind import Kind

HANDLER = Kind(
    name="handler",
    meaning="a Python function, imported once per warm instance",
    input_schema=lambda function: None,
    result_schema=lambda function: None,
    shown={"": (None, None)},
)
