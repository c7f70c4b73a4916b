"""Settings as data: a dataclass field with a default, a help text and a range.

`Experiment`, the optimisers and every method declare their settings with `option(...)`. TOML files, the command line and Python
use the same declarations and pass the same checks. A plain dataclass default (`mu: float = 0.1`) works too: it has no help text and
takes any finite value of its type.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from kilter.errors import Mistake, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PACKAGE = Path(__file__).parent
AnyField: TypeAlias = "Field[Any]"
T = TypeVar("T")
Bound = float | str | None  # a number, or the name of another field
# The settings of an experiment that say how to read a user's data. `run`, `inspect`, `join`, `peer` and site.toml take the same.
TABLE_SETTINGS = (
    "label",
    "task",
    "event",
    "client",
    "drop",
    "test_file",
    "test_size",
    "text",
    "tokenizer",
    "series",
    "prepare",
    "image_size",
    "image_mode",
    "schema",
)
TABLE_FILES = ("test_file", "tokenizer", "schema")  # those that name a file


@dataclass(frozen=True)
class Option:
    """What a declaration says about a setting, beyond its name, type and default."""

    help: str = ""
    at_least: Bound = None
    above: Bound = None
    at_most: Bound = None
    below: Bound = None

    def bounds(self) -> list[tuple[str, float | str]]:
        """The bounds that are set, in words: [("at least", 0), ("below", 1)]."""
        names = ("at_least", "above", "at_most", "below")
        return [(name.replace("_", " "), getattr(self, name)) for name in names if getattr(self, name) is not None]

    def range(self) -> str:
        """The range in words.

        >>> Option(at_least=0, below=1).range()
        'at least 0 and below 1'
        """
        return " and ".join(f"{name} {bound}" for name, bound in self.bounds())


def option(
    default: T,
    help: str = "",
    *,
    at_least: Bound = None,
    above: Bound = None,
    at_most: Bound = None,
    below: Bound = None,
) -> T:
    """Declare a setting: `mu: float = option(0.01, "Strength of the proximal term; 0 is FedAvg.", at_least=0)`.

    A bound may name another field: `a_min: float = option(0.1, "Smallest ratio.", above=0, at_most="a_max")`.
    """
    metadata = {"option": Option(help, at_least, above, at_most, below)}
    if isinstance(default, dict | list):  # every instance gets its own
        kind = type(default)
        return field(default_factory=lambda: kind(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declaration(field: AnyField) -> Option:
    """The declaration of a field; an empty one for a plain dataclass default."""
    declared = field.metadata.get("option")
    return declared if isinstance(declared, Option) else Option()


def default(field: AnyField) -> Any:
    """The default value of a field; None if it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def own_fields(kind: type, base: type) -> dict[str, AnyField]:
    """The fields a class adds to its base."""
    common = {f.name for f in fields(base)}
    return {f.name: f for f in fields(kind) if f.name not in common}


def choices(field: AnyField) -> tuple[str, ...]:
    """The values of a field of type Literal[...]; empty for other types."""
    kind: object = field.type
    if isinstance(kind, str):  # a module with postponed annotations keeps them as text
        kind = eval(kind, {"Literal": Literal}) if kind.startswith("Literal[") else object
    return get_args(kind) if get_origin(kind) is Literal else ()


KINDS: dict[type, type] = {bool: bool, int: Integral, float: Real, str: str}  # by the type of the default


# Checks ---------------------------------------------------------------------------------------------------------------


def check(settings: DataclassInstance, of: str) -> None:
    """Check every setting of an instance: type, choices, finite, range. A Mistake names the setting, the range and the value."""
    check_values(fields(settings), vars(settings), of)


def check_values(known: Iterable[AnyField], values: Mapping[str, Any], of: str) -> None:
    """Check settings before there is an instance; a setting without a value has its default."""
    known = list(known)
    values = {f.name: default(f) for f in known} | dict(values)
    for f in known:
        value = values[f.name]
        if allowed := choices(f):
            if value not in allowed:
                raise unknown(f"{f.name} of {of}", str(value), allowed)
        elif (kind := _kind(default(f))) is not None:
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise _wrong_type(f, value, of)
            if kind in (Integral, Real):
                _check_range(f, values, of)


def _kind(like: object) -> type | None:
    """The type that values of a setting with this default must have; None: any."""
    return next((kind for like_kind, kind in KINDS.items() if isinstance(like, like_kind)), None)


def _check_range(field: AnyField, values: Mapping[str, Any], of: str) -> None:
    declared, value = declaration(field), values[field.name]
    if value != value or abs(value) == math.inf:
        words = f"a finite number {declared.range()}".strip()
        raise Mistake(f"{field.name} of {of} must be {words}, not {value}.")
    for name, bound in declared.bounds():
        limit = values[bound] if isinstance(bound, str) else bound
        inside = {"at least": value >= limit, "above": value > limit, "at most": value <= limit, "below": value < limit}
        if not inside[name]:
            limits = f" ({bound} is {limit})" if isinstance(bound, str) else ""
            raise Mistake(f"{field.name} of {of} must be {declared.range()}, not {value}{limits}.")


def _wrong_type(field: AnyField, value: object, of: str) -> Mistake:
    like = default(field)
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list"}
    kind = wanted.get(type(like), type(like).__name__)
    return Mistake(f"{field.name} of {of} takes {kind} (such as {like!r}), not {value!r}.")


# Values from files and the command line -------------------------------------------------------------------------------


def convert(value: object, field: AnyField, of: str) -> Any:
    """A value from a file or the command line, converted to the type of the field's default."""
    like = default(field)
    if allowed := choices(field):
        if value not in allowed:
            raise unknown(f"{field.name} of {of}", str(value), allowed)
        return value
    try:
        return _as_type(value, like)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise _wrong_type(field, value, of) from None


def _as_type(value: Any, like: Any) -> Any:
    kind = type(like)
    if kind is bool:
        return (
            value
            if isinstance(value, bool)
            else {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        )
    if kind in (int, float) and (isinstance(value, bool) or (kind is int and not isinstance(value, str | int))):
        raise ValueError
    if kind is str and not isinstance(value, str):
        raise ValueError
    if isinstance(like, tuple):
        words = value.split(",") if isinstance(value, str) else list(value)
        return tuple(type(like[0])(w) if like else w for w in words)
    return kind(value)


def fill(kind: type, values: Mapping[str, object], of: str, allowed: Iterable[str] | None = None) -> dict[str, Any]:
    """Convert values for the fields of a dataclass. An unknown name is refused with the nearest known one."""
    known = {f.name: f for f in fields(kind) if allowed is None or f.name in set(allowed)}
    for name in values:
        if name not in known:
            if not known:
                raise Mistake(f"The {of} has no settings, but '{name}' was given.")
            raise unknown(f"field of the {of}", name, known)
    return {name: convert(value, known[name], f"the {of}") for name, value in values.items()}


# Declarations read from source, without importing what they declare ---------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A setting as its source file declares it."""

    name: str
    default: Any
    choices: tuple[str, ...]
    option: Option


@dataclass(frozen=True)
class ClassSource:
    """A class as its source file declares it."""

    name: str
    module_doc: str
    doc: str
    settings: dict[str, Setting]  # its own and, first, those of its bases in the same file
    needs: frozenset[str]
    states_average: bool = True
    tasks: tuple[str, ...] = ()  # that a method can learn; empty: all
    tasks_reason: str = ""


def read_classes(path: Path) -> dict[str, ClassSource]:
    """The classes of a source file. Importing it would import torch, which takes a second.

    >>> read_classes(PACKAGE / "train.py")["SGD"].settings["momentum"].option.range()
    'at least 0 and below 1'
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes: dict[str, ClassSource] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [classes[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in classes]
            settings = {name: setting for base in bases for name, setting in base.settings.items()}
            settings |= {s.name: s for line in node.body if (s := _setting(line))}
            doc, module_doc = ast.get_docstring(node) or "", ast.get_docstring(tree) or ""
            classes[node.name] = ClassSource(
                node.name,
                module_doc,
                doc,
                settings,
                frozenset(_constant(node, "needs", ())),
                _constant(node, "states_average", True),
                tuple(sorted(_constant(node, "tasks", ()))),
                _constant(node, "tasks_reason", ""),
            )
    return classes


def _setting(line: ast.stmt) -> Setting | None:
    """The setting that a line of a class declares with `option(...)`; None for any other line."""
    if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(line.value, ast.Call)):
        return None
    call = line.value
    if not (isinstance(call.func, ast.Name) and call.func.id == "option"):
        return None
    like, *words = (ast.literal_eval(argument) for argument in call.args)
    bounds = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    kind, names = line.annotation, ()
    if isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name) and kind.value.id == "Literal":
        names = ast.literal_eval(kind.slice)
    return Setting(line.target.id, like, names, Option(*words, **bounds))


def _constant(node: ast.ClassDef, name: str, otherwise: Any) -> Any:
    """What a class assigns to this name: a constant, or `frozenset` of one."""
    for line in node.body:
        if isinstance(line, ast.Assign) and [ast.unparse(t) for t in line.targets] == [name]:
            value = line.value
            if not isinstance(value, ast.Call):
                return ast.literal_eval(value)
            return ast.literal_eval(value.args[0]) if value.args else ()
    return otherwise
