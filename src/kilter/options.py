"""Hyper-parameters are typed dataclass fields with a default and a short comment; files and the command line are made from them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin

from kilter.errors import Mistake, unknown


@cache
def comments(kind: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, its bases' first: the help of the command line."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        for name, text in re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", source, re.MULTILINE):
            found[name] = text.strip()
    return found


def default(field: Field[Any]) -> Any:
    """A field's default value."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def own_fields(kind: type, base: type) -> dict[str, Field[Any]]:
    """The fields a class adds to its base."""
    common = {f.name for f in fields(base)}
    return {f.name: f for f in fields(kind) if f.name not in common}


def options(field: Field[Any]) -> tuple[str, ...]:
    """What a field of type Literal[...] may be; nothing for others."""
    kind = field.type
    if isinstance(kind, str):  # a module with postponed annotations keeps them as text
        kind = eval(kind, {"Literal": Literal}) if kind.startswith("Literal[") else object
    return get_args(kind) if get_origin(kind) is Literal else ()


def convert(value: Any, field: Field[Any], of: str) -> Any:
    """A value from a file or the command line as the field wants it, or a Mistake that says what it takes."""
    like = default(field)
    if choices := options(field):
        if value not in choices:
            raise unknown(f"{field.name} of {of}", str(value), choices)
        return value
    kind = type(like)
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if kind is int and not (isinstance(value, str | int) and not isinstance(value, bool)):
            raise ValueError
        if kind is float and isinstance(value, bool):
            raise ValueError
        if kind is str and not isinstance(value, str):
            raise ValueError
        if kind is tuple:
            words = value.split(",") if isinstance(value, str) else list(value)
            return tuple(type(like[0])(w) if like else w for w in words)
        return kind(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list"}.get(
            kind, kind.__name__
        )
        raise Mistake(f"{field.name} of {of} takes {wanted} (such as {like!r}), not {value!r}.") from None


def fill(kind: type, values: Mapping[str, Any], of: str, allowed: Iterable[str] | None = None) -> dict[str, Any]:
    """Values for a dataclass' fields, checked: unknown names get the nearest right one."""
    known = {f.name: f for f in fields(kind) if allowed is None or f.name in set(allowed)}
    for name in values:
        if name not in known:
            if not known:
                raise Mistake(f"The {of} has no settings, but '{name}' was given.")
            raise unknown(f"field of the {of}", name, known)
    return {name: convert(value, known[name], f"the {of}") for name, value in values.items()}
