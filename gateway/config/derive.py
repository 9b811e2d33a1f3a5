"""From a declared setting to its check: a frozen dataclass becomes the pydantic type that makes one from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model

from manager.function import Setting, settings_of
from tangram import types

#: How a number is written, by the unit of its field's name.
_UNITS = ("s", "bytes")
#: Fields of an inline bound; the others of a `Setting` are words.
_BOUNDS = ("ge", "gt", "le", "pattern", "min_length")


#: Beyond it JSON's numbers are not exact.
INTEGER_MAX = 2**53


class Section(BaseModel):
    """A part of the YAML: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_alias=True, allow_inf_nan=False)


def refuse_boolean(value: object) -> object:
    """Refuse a boolean as a number; text with digits is one too (an interpolated variable)."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Seconds = Annotated[
    float,
    BeforeValidator(types.duration_s),
    WithJsonSchema({"type": "string", "pattern": f"^{types.DURATION_PATTERN}$", "examples": ["30s"]}),
]
Bytes = Annotated[
    int,
    BeforeValidator(types.size_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"^{types.SIZE_PATTERN}$"},
                {"type": "integer", "minimum": 0},
            ],
            "examples": ["512Mi"],
        }
    ),
]


def _at_least_bytes(least: int, value: int) -> int:
    """Refuse fewer bytes; the least is told as sizes are written."""
    if value < least:
        raise ValueError(f"must be at least {types.show_size(least)}")
    return value


def section_of(noun: type, **forms: Any) -> Any:
    """Return the type by which pydantic makes a ``noun`` from its section of the YAML.

    Any: what pydantic is told is an expression. ``forms`` are the types of fields whose YAML has a form of its own.
    """
    return Annotated[model_of(noun, **forms), AfterValidator(partial(made, noun))]


def given_of(noun: type) -> Any:
    """Return the type that yields the fields of a ``noun`` that a section gives, by name; none is required."""
    return Annotated[_model(noun, {}, optional=True), AfterValidator(_given)]


def _given(checked: BaseModel) -> Mapping[str, object]:
    """Return what a section gives, null left out."""
    return {name: value for name in checked.model_fields_set if (value := getattr(checked, name)) is not None}


def model_of(noun: type, **forms: Any) -> type[Section]:
    """Return the model of a noun's section, whose fields are its settings."""
    return _model(noun, forms)


def key_of(name: str, setting: Setting) -> str:
    """Return the key of a field: its name without its unit, unless the setting says otherwise."""
    stem, _, unit = name.rpartition("_")
    return setting.key or (stem if unit in _UNITS else name)


def made(noun: type, checked: BaseModel) -> Any:
    """Make a noun from its checked section; Any: it is a ``noun``."""
    return noun(**values(noun, checked))


def values(noun: type, checked: BaseModel) -> dict[str, Any]:
    """Return the settings of a noun from its checked section, by field."""
    return {
        name: made(_bare(hint), checked) if setting.inline else getattr(checked, _attribute(name))
        for name, hint, setting in settings_of(noun)
    }


def _model(noun: type, forms: Mapping[str, Any], *, optional: bool = False) -> type[Section]:
    return create_model(noun.__name__, __base__=Section, __doc__=noun.__doc__, **_fields(noun, forms, optional))


def _fields(noun: type, forms: Mapping[str, Any], optional: bool) -> dict[str, Any]:
    """Return the fields of the model: type and what else is told of it, by attribute."""
    declared = {field.name: field for field in fields(noun)}
    found: dict[str, Any] = {}
    for name, hint, setting in settings_of(noun):
        if setting.inline:
            found |= _fields(_bare(hint), forms, optional)
            continue
        form = forms[name] if name in forms else _form(hint, name.rpartition("_")[2])
        told: dict[str, Any] = {"validation_alias": key_of(name, setting), "description": setting.meaning}
        if optional:
            form, told["default"] = form | None, None
        elif declared[name].default is not MISSING:
            told["default"] = declared[name].default
        elif declared[name].default_factory is not MISSING:
            told["default_factory"] = declared[name].default_factory
        found[_attribute(name)] = (form, Field(repr=declared[name].repr, **told))
    return found


def _attribute(name: str) -> str:
    """A model has attributes of its own: ``json``."""
    return f"{name}_" if hasattr(Section, name) else name


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _form(hint: Any, unit: str, bounds: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return what pydantic checks an annotation with; bounds belong to its innermost type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _form(args[0], unit, {**bounds, **_bounds(args[1:])})
    if origin in (Union, UnionType):
        return Union[tuple(_form(each, unit, bounds) for each in args)]  # noqa: UP007  # made at run time
    if hint is float and unit != "s":
        return Annotated[float, Field(**bounds), BeforeValidator(refuse_boolean)]
    if hint is int and unit != "bytes":
        return Annotated[int, Field(**{"le": INTEGER_MAX, **bounds}), BeforeValidator(refuse_boolean)]
    if hint is Path and bounds:
        return Annotated[str, Field(**bounds), AfterValidator(lambda text: Path(text))]
    form = hint
    if origin is tuple:
        form = tuple[_form(args[0], unit), ...]  # type: ignore[misc]  # made at run time
    elif origin in (Mapping, dict):
        form = dict.__class_getitem__(tuple(_form(each, unit) for each in args))
    elif isinstance(hint, type) and is_dataclass(hint):
        form = section_of(hint)
    elif hint is float:
        form = Seconds
    elif hint is int:
        return Annotated[Bytes, AfterValidator(partial(_at_least_bytes, bounds.get("ge", 0)))]
    return Annotated[form, Field(**bounds)] if bounds and hint is not type(None) else form


def _bounds(said: tuple[object, ...]) -> dict[str, Any]:
    settings = [each for each in said if isinstance(each, Setting)]
    for each in settings:
        if each.pattern is not None:
            types.declare(each.pattern, each.words)
    found = {name: bound for each in settings for name in _BOUNDS if (bound := getattr(each, name)) is not None}
    return {**found, "coerce_numbers_to_str": True} if any(each.number_too for each in settings) else found
