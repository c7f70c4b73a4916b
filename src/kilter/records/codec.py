"""Records as JSON and as plain trees: the only place that writes and reads them."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from kilter.errors import Mistake
from kilter.records.types import FORMAT, Checkpoint, ClientReport, Clients, Partition, Round, Summary
from kilter.records.upgrade import upgrade

Record = Round | Summary | Clients | Checkpoint | Partition
R = TypeVar("R", Round, Summary, Clients, Checkpoint, Partition)


class Unreadable(Mistake):
    """A record that is damaged or of another program."""


class NewerFormat(Unreadable):
    """A record that a newer Kilter wrote."""


def to_json(record: Record, indent: int = 0) -> str:
    """A record as JSON, on one line unless indented."""
    text = msgspec.json.encode(record)
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def from_json(kind: type[R], text: str | bytes) -> R:
    """The record in this JSON text; older formats are converted."""
    try:
        values = json.loads(text)
    except ValueError:
        raise Unreadable("it is not JSON") from None
    return from_tree(kind, values)


def to_tree(record: Record) -> dict[str, Any]:
    """A record as nested dicts and lists of plain values."""
    tree: dict[str, Any] = msgspec.to_builtins(record)
    return tree


def from_tree(kind: type[R], values: object) -> R:
    """The record in this tree; older formats are converted."""
    if not isinstance(values, dict):
        raise Unreadable("it is not a record")
    version = values.get("format", 1)
    if not isinstance(version, int) or version > FORMAT:
        raise NewerFormat(f"its format is {version!r}, and this version of Kilter reads formats up to {FORMAT}")
    try:
        return msgspec.convert(upgrade(kind, values) if version < FORMAT else values, kind)
    except (msgspec.ValidationError, LookupError, TypeError, AttributeError, ValueError) as e:
        raise Unreadable(str(e)) from None


def read_report(values: object) -> ClientReport:
    """A client's report, as it came from the client."""
    try:
        return msgspec.convert(values, ClientReport)
    except msgspec.ValidationError as e:
        raise Unreadable(str(e)) from None


def schema() -> dict[str, Any]:
    """The JSON schema of every record that a run writes."""
    kinds = (Round, Summary, Clients, Partition)
    references, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    files = zip(("a line of rounds.jsonl", "summary.json", "clients.json", "partition.json"), references, strict=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Records of a Kilter run, format {FORMAT}",
        "anyOf": [{"title": title, **reference} for title, reference in files],
        "$defs": definitions,
    }
