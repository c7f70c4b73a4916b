"""What each method is, keeps and sends, read from its source file without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kilter.options import PACKAGE, ClassSource, Setting, read_classes


@dataclass(frozen=True)
class Description:
    """What a method's file says."""

    paper: str
    keeps: str
    sends: str
    topologies: tuple[str, ...]
    tasks: tuple[str, ...]  # that it can learn; empty: all
    tasks_reason: str  # why not the others
    settings: tuple[Setting, ...]


def descriptions() -> dict[str, Description]:
    """Every method by name: the built-in ones, and those that other packages offer in the entry-point group `kilter.methods`."""
    files = sorted((PACKAGE / "methods").glob("[!_]*.py"))
    methods = {path.stem.replace("_", "-"): describe(_method_class(path)) for path in files}
    for point in entry_points(group="kilter.methods"):
        spec = find_spec(point.module)
        if spec is not None and spec.origin is not None:
            methods[point.name] = describe(read_classes(Path(spec.origin))[point.attr])
    return methods


def _method_class(path: Path) -> ClassSource:
    return next(source for source in read_classes(path).values() if "Keeps:" in source.doc)


def describe(source: ClassSource) -> Description:
    """The paper is the first line of the file; the class's docstring ends with "Keeps: ...  Sends: ..."."""
    match = re.search(r"Keeps: (.*?)\.? Sends: (.*)$", " ".join(source.doc.split()))
    keeps, sends = match.groups() if match else ("", "")
    lines = [source.module_doc.split("\n")[0], keeps, sends]
    paper, keeps, sends = (line.strip().removesuffix(".") for line in lines)
    return Description(
        paper,
        keeps,
        sends,
        topologies(source.needs, source.states_average),
        source.tasks,
        source.tasks_reason,
        tuple(source.settings.values()),
    )


def topologies(needs: frozenset[str], states_average: bool) -> tuple[str, ...]:
    """The topologies a method with these needs runs under."""
    if "everyone" in needs:
        return ("the full graph of peers",)
    if "aggregator" in needs:
        return ("star", "rotating")
    return ("star", "rotating", *(("groups (aggregators:2)",) if states_average else ()), "any graph of peers")


def table(methods: Mapping[str, Description], costs: Mapping[str, object] | None = None) -> Table:
    """One row for each method: its paper, what it keeps, sends and costs, where it runs, its settings."""
    rows = Table("method", "", box=None, pad_edge=False, show_header=False)
    for name, method in methods.items():
        lines = [method.paper, f"keeps: {method.keeps}", f"sends: {method.sends}"]
        if costs:
            lines.append(f"costs: {costs[name]}")
        lines.append(f"under: {', '.join(method.topologies)}")
        why = f"; no other task, because {method.tasks_reason}" if method.tasks else ""
        lines.append(f"learns: {', '.join(method.tasks) or 'every task'}{why}")
        lines += [f"--set {s.name}={s.default}  {s.option.help}" for s in method.settings]
        rows.add_row(Text(name, "bold"), Text("\n".join(lines)))
        rows.add_row()
    return rows
