"""The settings of --prepare and --series: how the columns of a table are prepared."""

from __future__ import annotations

from dataclasses import replace

from kilter.data.schema import SETTINGS, Column, Schema, with_series
from kilter.errors import Mistake


def parse_prepare(text: str) -> Column:
    """The options of --prepare, NAME=VALUE separated by commas, as a column with these settings.

    >>> parse_prepare("fill=median,clip=0.01").fill
    'median'
    """
    fields: dict[str, object] = {"name": "all", "kind": "number"}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = pair.partition("=")
        if name in ("scale", "parts", "ids") and value in ("yes", "no"):
            fields[name] = value == "yes"
        elif name == "clip" and is_decimal(value):
            fields[name] = float(value)
        elif name in ("least", "width", "vocabulary", "sequence", "embed") and value.isdecimal():
            fields[name] = int(value)
        elif name == "fill":
            fields[name] = value
        else:
            raise Mistake(
                f"--prepare does not know '{pair}': use fill=mean, fill=median, fill=most-frequent, clip=0.01, scale=no, "
                "parts=yes (dates), embed=8, least=5 (categories), width=1024, vocabulary=1000, sequence=64 or ids=yes (texts), "
                "separated by commas."
            )
    try:
        return Column.parse(fields)
    except ValueError as error:
        raise Mistake(f"--prepare: {str(error).replace(chr(39) + 'all' + chr(39) + ' ', '')}.") from None


def with_settings(schema: Schema, prepare: str) -> Schema:
    """The same columns, prepared as --prepare says."""
    settings = {k: v for k, v in parse_prepare(prepare).plain().items() if k not in ("name", "kind")}
    return replace(schema, columns=tuple(Column.parse({**column.plain(), **settings}) for column in schema.columns))


def prepared_differently(schema: Schema, prepare: str, series: tuple[str, ...]) -> str:
    """How --prepare and --series contradict a schema; empty if they do not."""
    wanted = with_settings(schema, prepare)
    wanted = with_series(wanted, series) if series else wanted
    by_name = {column.name: column for column in wanted.columns}
    for column in schema.columns:
        for name in SETTINGS:
            value, own = getattr(by_name[column.name], name), getattr(column, name)
            if value != own:
                option = "--series" if name == "series" else "--prepare"
                return f"column '{column.name}' has {name}={shown(own)} there, and {option} wants {shown(value)}"
    return ""


def shown(value: object) -> str:
    """A setting as --prepare takes it."""
    return (
        {True: "yes", False: "no", "": "none"}.get(value, str(value)) if isinstance(value, bool | str) else str(value)
    )


def is_decimal(text: str) -> bool:
    """Whether this is a number with a decimal point, or a whole number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
