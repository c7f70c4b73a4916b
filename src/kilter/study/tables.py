"""A study's tables for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kilter.records.display import accuracy, size
from kilter.study.results import SKEWED, CellResult, Line, Results
from kilter.study.schema import MEASURES
from kilter.study.statistics import CONFIDENCE, FEWEST, LEVEL, RESAMPLES, Difference
from kilter.study.table_details import by_class, classes_by_client, variants

NAMES = {
    "global": "Global accuracy",
    "client": "Client accuracy",
    "local": "Local accuracy",
    "skewed": "Accuracy of the skewed clients",
}
WORDS = ("in words", "method", "what", "chosen", "metric")  # headings of columns with text
MARKS = {"higher": " ▲", "lower": " ▼", "higher, uncorrected": " △", "lower, uncorrected": " ▽"}


@dataclass(frozen=True)
class Sheet:
    """A table of texts."""

    title: str
    headings: list[str]
    rows: list[list[str]]


# Numbers as text ---------------------------------------------------------------------------------------------------


def shown(results: Results, value: tuple[float, float | None] | None) -> str:
    """A mean and a standard deviation of the main metric."""
    if results.scale == 100 or value is None:
        return accuracy(value)
    mean, std = value
    return f"{mean:.4g}" + (f" ± {std:.2g}" if std is not None else "")


def named(results: Results, measure: str) -> str:
    """A measure by its name: Global accuracy, Client mae."""
    return NAMES[measure].replace("accuracy", results.metric)


def unit(results: Results) -> str:
    return " in %" if results.scale == 100 else ""


def difference(d: Difference | None, scale: int = 100) -> list[str]:
    """A difference with its interval in points, p, p corrected by Holm, and the verdict."""
    if d is None:
        return ["", "", "", ""]
    form = "+.1f" if scale == 100 else "+.3g"
    known = d.low is not None and d.high is not None
    interval = f" [{scale * (d.low or 0.0):{form}}, {scale * (d.high or 0.0):{form}}]" if known else ""
    ps = ["-" if p is None else f"{p:.2g}" for p in (d.p, d.p_holm)]
    return [f"{scale * d.mean:{form}}{interval}", *ps, d.verdict]


def reached(line: Line, what: str) -> str:
    """The median over seeds, and how many seeds reached the target if not all did."""
    middle, seeds = line.reached(what)
    of = len(getattr(line, what))
    if not of:
        return "-"
    some = f" ({seeds} of {of})" if 0 < seeds < of else ""
    if middle is None:
        return f"not reached{some}"
    return (size(middle) if what == "bytes_to" else f"{middle:g}") + some


def settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{k} = {v}" for k, v in values.items())


# Tables ---------------------------------------------------------------------------------------------------------------


def sheets(results: Results) -> list[Sheet]:
    """An overview of several cells, accuracies and costs of each cell, what was tuned, what did not happen."""
    tables = [overview(results)] if len(results.cells) > 1 else []
    for cell in results.cells:
        tables += [accuracies(results, cell, m) for m in ("global", "client")]
        if results.study.measure == "local":
            grouped = any("skewed" in run.accuracy for line in cell.lines for run in line.runs)
            tables += [accuracies(results, cell, m) for m in ("local", *(["skewed"] if grouped else []))]
            tables.append(extremes(results, cell))
        tables.append(cost(results, cell))
        tables += detail(results, cell)
    tables += [tuned(results)] if results.choices else []
    return tables + ([missed] if (missed := notices(results)).rows else [])


def detail(results: Results, cell: CellResult) -> list[Sheet]:
    """The methods' other results, and the metrics of each class if the study asks for them."""
    more = {"other results on the common test set": variants(cell)}
    if results.study.by_class:
        more["each class against the rest"] = by_class(results, cell)
    more["each class at each client"] = classes_by_client(cell)
    return [Sheet(f"{cell.cell.name}: {title}, in %", *content) for title, content in more.items() if content]


def overview(results: Results) -> Sheet:
    """Methods by cells."""
    m = results.study.measure
    rows = []
    for at, entry in enumerate(results.study.entries):
        row = [_name(results, results.cells[0].lines[at], note=False)]
        for cell in results.cells:
            d = cell.lines[at].differences[m]
            row.append(shown(results, cell.lines[at].over_seeds(m)) + (MARKS.get(d.verdict, "") if d else ""))
        rows.append(row)
        assert results.cells[0].lines[at].label == entry.label
    title = (
        f"{named(results, m)}{unit(results)}, mean ± std over seeds; ▲ higher, ▼ lower than {results.study.reference}; "
        "△, ▽: uncorrected"
    )
    return Sheet(title, ["method", *(c.cell.name for c in results.cells)], rows)


def accuracies(results: Results, cell: CellResult, measure: str) -> Sheet:
    """One measure in one cell, with the paired difference to the reference."""
    worst, printed = measure == "client", any(measure in line.paper for line in cell.lines)
    headings = ["method", "mean ± std", *(["worst tenth"] if worst else [])]
    headings += [f"minus {results.study.reference}", "p", "p (Holm)", "in words", *(["paper"] if printed else [])]
    rows = []
    for line in cell.lines:
        row = [_name(results, line, note=measure == "global"), shown(results, line.over_seeds(measure))]
        if worst:
            w = line.mean("worst")
            row.append("-" if w is None else f"{100 * w:.1f}" if results.scale == 100 else f"{w:.4g}")
        is_reference = line.label == results.study.reference
        row += ["", "", "", "reference"] if is_reference else difference(line.differences[measure], results.scale)
        if printed:
            std = line.paper.get("std")
            row.append(accuracy((line.paper[measure], std)) if measure in line.paper else "-")
        rows.append(row)
    return Sheet(f"{cell.cell.name}: {named(results, measure).lower()}{unit(results)}", headings, rows)


def extremes(results: Results, cell: CellResult) -> Sheet:
    """Every client's model on the common test set, with classes weighted as at the client (local) and unweighted (global).

    With more than five classes also the top-5 accuracy on the client's own test rows.
    """
    named = {"local": "local", "common": "global"}
    if any(0 < (line.over_clients("top5", "min") or 0) < 1 for line in cell.lines):
        named["top5"] = "top-5"
    columns = [(part, name) for part in named for name in ("min", "mean", "max")]
    rows = []
    for line in cell.lines:
        values = [line.over_clients(part, name) for part, name in columns]
        rows.append([_name(results, line, note=False), *("-" if v is None else f"{100 * v:.1f}" for v in values)])
    headings = [f"{named[part]} {name}" for part, name in columns]
    own = " (top-5: on their own test rows)" * ("top5" in named)
    return Sheet(f"{cell.cell.name}: clients on the common test set{own} in %", ["method", *headings], rows)


def cost(results: Results, cell: CellResult) -> Sheet:
    """What it took."""
    printed = any("rounds_to" in line.paper for line in cell.lines)
    rows = []
    for line in cell.lines:
        total, seconds = line.mean("bytes"), line.mean("seconds")
        row = [_name(results, line, note=False), reached(line, "rounds_to")]
        row += [f"{line.paper['rounds_to']:g}" if "rounds_to" in line.paper else "-"] if printed else []
        at_ecr = line.cost_at_ecr(line.label in results.study.proposed)
        row += [reached(line, "bytes_to"), "-" if line.ecr is None else str(line.ecr)]
        row += ["-" if at_ecr is None else f"{at_ecr:,.0f}"] if results.study.proposed else []
        row += ["-" if total is None else size(total), "-" if seconds is None else f"{seconds:.1f}"]
        rows.append(row)
    headings = ["method", "rounds to target", *(["paper"] if printed else []), "bytes to target", "ECR"]
    headings += ["ECR cost"] if results.study.proposed else []
    return Sheet(f"{cell.cell.name}: cost; target: {cell.target_is}", [*headings, "bytes in all", "seconds"], rows)


def tuned(results: Results) -> Sheet:
    """The choices of tuning."""
    rows = []
    for c in results.choices:
        score = "-" if c.score is None else f"{100 * c.score:.1f} %" if c.metric == "accuracy" else f"{c.score:.4g}"
        rows.append([c.cell, c.label, settings(c.settings), score, c.metric, str(c.runs)])
    title = f"Tuned on validation rows, {results.budget} runs for each method in each cell"
    return Sheet(title, ["cell", "method", "chosen", "on validation rows", "metric", "runs"], rows)


def notices(results: Results) -> Sheet:
    """What did not happen as intended, over the seeds of each method in each cell."""
    rows = []
    for cell in results.cells:
        for line in cell.lines:
            for what in dict.fromkeys(notice.what for run in line.runs for notice in run.notices):
                counts = [notice.count for run in line.runs for notice in run.notices if notice.what == what]
                rows.append([cell.cell.name, line.label, what, str(sum(counts)), f"{len(counts)} of {len(line.runs)}"])
    return Sheet(
        "Not as intended (details: rounds.jsonl of the runs)", ["cell", "method", "what", "times", "runs"], rows
    )


def _name(results: Results, line: Line, note: bool) -> str:
    of = len(results.study.seeds)
    some = f" ({len(line.runs)} of {of} seeds)" if len(line.runs) < of else ""
    return f"{line.label}{' *' if note and line.own_models else ''}{some}"


def _about_local(results: Results) -> list[str]:
    lines = [
        "Local accuracy: the mean over clients, each with the model it would use on the common test set, with classes "
        "weighted by their shares of the client's training rows; global beside it: the same test set, unweighted."
    ]
    if any("skewed" in run.accuracy for cell in results.cells for line in cell.lines for run in line.runs):
        lines.append(
            f"Skewed clients: those whose labels have an entropy below {SKEWED:.0%} of that of all labels together; their "
            "local accuracy, as a group."
        )
    return lines


def caption(results: Results) -> list[str]:
    """How the numbers were computed, one sentence each."""
    study = results.study
    n = len(study.seeds)
    lines = [
        f"Over {n} seed{'s' if n > 1 else ''} ({_list(study.seeds)}), at the last round. All methods of a cell share the split, "
        "the initial weights and the cohorts of each seed, so differences are taken seed by seed.",
    ]
    if len(study.entries) > 1 and n < FEWEST:
        lines.append(f"With fewer than {FEWEST} seeds there is no interval and no p.")
    elif len(study.entries) > 1:
        least = 2.0 ** (1 - n)
        lines.append(
            f"In brackets: {100 * CONFIDENCE:.0f} % bootstrap interval of the mean difference (BCa, {RESAMPLES} resamples of the "
            f"seeds), in points; with so few seeds it is narrower than it should be. p: exact two-sided sign-flip test, which "
            f"cannot fall below {least:.2g} with {n} seeds: all seeds then agree. p (Holm): corrected for all comparisons "
            f"with the reference in the same table. 'higher' and 'lower' need an interval without 0 and p (Holm) <= {LEVEL:g}; "
            f"'uncorrected' means p <= {LEVEL:g} alone, which one comparison in ten shows by chance."
        )
        if (compared := len(study.entries) - 1) * least > LEVEL:
            lines.append(
                f"With {n} seeds and {compared} comparisons, no difference can reach p (Holm) <= {LEVEL:g}: read 'uncorrected' as "
                "a hint, and repeat the cell with more seeds to confirm it."
            )
    if any(line.own_models for cell in results.cells for line in cell.lines):
        lines.append("* no global model: the mean over the clients' own models on the common test set.")
    lines.append(
        f"{named(results, 'client')}: the mean over clients, each on its own test rows with the model it would use; "
        "worst tenth: the mean over the worst tenth of the clients."
    )
    lines += _about_local(results) if study.measure == "local" else []
    lines.append(
        f"Target: the first evaluated round whose {study.measure} {results.metric} reaches it, median over seeds (never counts as "
        "infinite); bytes: all training traffic, every letter counted once, set-up included."
    )
    if study.proposed:
        lines.append(
            f"ECR as in FedDisk's paper: {', '.join(study.proposed)} to the best baseline's maximum plus set-up rounds, every "
            "other method to its own maximum; this is not like for like. ECR cost: the numbers (of four bytes) that a client sends "
            "and receives until then, as in the paper's Eq. 18-19."
        )
    else:
        lines.append(
            "ECR: the round of a method's own maximum (of the mean curve), as FedDisk's paper counts baselines."
        )
    lines.append("Seconds: of a run's rounds while the other runs of the study share the machine.")
    if results.choices:
        lines.append(
            "Tuning used its own seeds and validation rows only; every method with something to tune had the same number of runs."
        )
    if source := study.paper.get("source"):
        lines.append(f"Paper: {source}. Compare orders, not values, where sizes differ.")
    return lines + results.notes


def _list(seeds: Sequence[int]) -> str:
    return (
        f"0..{len(seeds) - 1}"
        if list(seeds) == list(range(len(seeds))) and len(seeds) > 2
        else ", ".join(map(str, seeds))
    )


def failures(results: Results) -> list[str]:
    """Every failed run and why it failed."""
    return [f"{f.job.title}: {f.reason}" for f in results.failures]


# Output ---------------------------------------------------------------------------------------------------------


def show(results: Results, console: Console) -> None:
    """Print the tables in the terminal."""
    for sheet in sheets(results):
        table = Table(
            title=escape(sheet.title), title_justify="left", title_style="bold", box=None, header_style="bold"
        )
        for at, heading in enumerate(sheet.headings):
            table.add_column(
                escape(heading),
                justify="left" if at == 0 or heading in WORDS else "right",
                no_wrap=at == 0 or heading.startswith("minus"),
            )
        for row in sheet.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print()
    for text in caption(results):
        console.print(text, markup=False, style="dim")
    if results.failures:
        console.print(f"\n{len(results.failures)} runs failed:", style="bold red")
        for text in failures(results):
            console.print(f"  {text}", markup=False, soft_wrap=True)


def markdown(results: Results, level: int = 2) -> str:
    """The tables as Markdown."""
    parts = []
    for sheet in sheets(results):
        head = "| " + " | ".join(map(_cell, sheet.headings)) + " |"
        rule = "|" + "|".join("---" if at == 0 else "---:" for at in range(len(sheet.headings))) + "|"
        rows = ["| " + " | ".join(map(_cell, row)) + " |" for row in sheet.rows]
        parts.append("\n".join([f"{'#' * level} {sheet.title}", "", head, rule, *rows]))
    parts.append("\n".join(f"- {text}" for text in caption(results)))
    if results.failures:
        parts.append("\n".join([f"{'#' * level} Failed runs", "", *(f"- {text}" for text in failures(results))]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def comma_separated(results: Results) -> str:
    """The numbers as CSV, one row for each method in each cell."""
    rows = [numbers(results, cell, line) for cell in results.cells for line in cell.lines]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(k for row in rows for k in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def numbers(results: Results, cell: CellResult, line: Line) -> dict[str, Any]:
    """Everything the tables say about a method in a cell, as plain values."""
    row: dict[str, Any] = {"cell": cell.cell.name, **cell.cell.values, "method": line.label, "seeds": len(line.runs)}
    for m in NAMES if any("skewed" in run.accuracy for run in line.runs) else MEASURES:
        mean, std = line.over_seeds(m) or (None, None)
        d = line.differences[m]
        row |= {f"{m}_mean": mean, f"{m}_std": std}
        for name in ("mean", "low", "high", "p", "p_holm", "verdict"):
            row[f"{m}_difference" + ("" if name == "mean" else f"_{name}")] = getattr(d, name) if d else None
        row[f"{m}_paper"] = line.paper.get(m)
    for part in ("local", "common"):
        row |= {f"{part}_{name}_client": line.over_clients(part, name) for name in ("min", "max")}
    row |= {
        "common_mean": line.over_clients("common", "mean"),
        "worst_tenth": line.mean("worst"),
        "target": cell.target,
    }
    for what in ("rounds_to", "bytes_to"):
        row[f"{what}_target"], row[f"seeds_{what}_target"] = line.reached(what)
    row |= {
        "ecr": line.ecr,
        "bytes": line.mean("bytes"),
        "tuned": settings(line.choice.settings) if line.choice else None,
    }
    return row | {"seconds": line.mean("seconds")}
