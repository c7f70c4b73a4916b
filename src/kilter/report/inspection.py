"""The result of `kilter inspect`: tables for the terminal, and a page with figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kilter.data.inspection import Inspection

Rows = Sequence[Sequence[str]]
COLUMNS = ("column", "holds", "gaps", "different", "lowest", "mean", "highest", "AUROC alone")
CLIENTS = ("client", "train", "test", "classes", "gaps", "entropy", "KL", "JS", "AUROC of its rows")
LEGEND = (
    "AUROC alone: how well a column separates the classes by itself (0.5: not at all, 1: perfectly).",
    "Entropy, KL and JS: of a client's labels, and their divergence from those of all clients, in nats.",
    "AUROC of its rows: how well a classifier tells a client's rows from those of others (0.5: they look the same).",
)


def number(value: float | None, digits: int = 3) -> str:
    """A number in a table; - for none."""
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) >= 1 else f"{value:.2f}"


def cell(value: float | None, kind: str) -> str:
    """A number of a column in a table: days since 1970 are dates."""
    if kind != "date" or value is None:
        return number(value)
    return str(np.datetime64(0, "D") + np.timedelta64(round(value), "D"))


def facts(report: Inspection) -> list[tuple[str, str]]:
    """Overall facts as pairs of a name and a text."""
    counts = list(report.classes.items())
    classes = ", ".join(f"{name} {count:,}" for name, count in counts[:10]) + (", ..." if len(counts) > 10 else "")
    copies = report.duplicates
    lines = [
        ("rows", f"{report.train:,} for training, {report.test:,} for test"),
        ("a prepared row", " x ".join(map(str, report.shape)) + " numbers"),
        *([("task", report.task)] if report.task else []),
        *([(f"{len(counts)} {'labels' if report.task == 'multi-label' else 'classes'}", classes)] if counts else []),
        (
            "repeated rows",
            f"{copies.within:,}; in training and test {copies.train_test:,}; at several clients {copies.clients:,}",
        ),
    ]
    if copies.similar is not None:
        lines.append(("test images that look like a training image", f"{copies.similar:,}"))
    if report.skew:
        skew = report.skew
        lines += [
            ("label skew", f"KL {number(skew['kl'])}, JS {number(skew['js'])} (means over clients)"),
            ("feature skew", f"{number(skew['feature'])} standard deviations within a class"),
            (
                "quantity skew",
                f"Gini {number(skew['gini'])}; {skew['smallest']:,} to {skew['largest']:,} rows of a client",
            ),
        ]
    else:
        lines.append(("clients", "the data names none: a partition rule divides it"))
    return lines


def column_rows(report: Inspection) -> Rows:
    return [
        (
            c.name,
            c.kind,
            f"{c.gaps:.0%}",
            f"{c.distinct:,}",
            cell(c.low, c.kind),
            cell(c.mean, c.kind),
            cell(c.high, c.kind),
            number(c.auroc),
        )
        for c in report.columns
    ]


def client_rows(report: Inspection) -> Rows:
    return [
        (
            c.name,
            f"{c.train:,}",
            f"{c.test:,}",
            str(c.classes),
            f"{c.gaps:.0%}",
            number(c.entropy),
            number(c.kl),
            number(c.js),
            number(c.auroc),
        )
        for c in report.clients
    ]


def tables(report: Inspection) -> list[RenderableType]:
    """For the terminal."""
    parts: list[RenderableType] = [Text(report.name, style="bold"), grid((), facts(report))]
    if report.columns:
        parts += ["", grid(COLUMNS, column_rows(report))]
    if report.clients:
        shown = client_rows(report)
        parts += ["", grid(CLIENTS, shown[:40])]
        if len(shown) > 40:
            parts.append(f"... and {len(shown) - 40} more clients (--json or --html shows all)")
    parts += [
        "",
        *(Text(f"Warning: {text}") for text in report.warnings),
        *(Text(line, style="dim") for line in LEGEND),
    ]
    return parts


def grid(header: Sequence[str], rows: Rows) -> Table:
    """A table without lines, for the terminal."""
    table = Table(*header, box=None, show_header=bool(header), header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def page(report: Inspection) -> str:
    """One HTML file that needs nothing else."""
    listed = "".join(f"<li>{escape(text)}</li>" for text in report.warnings) or "<li>none</li>"
    parts = [
        f"<h1>{escape(report.name)}</h1>",
        html_table((), facts(report)),
        f"<h2>Warnings</h2><ul>{listed}</ul>",
    ]
    if report.classes:
        parts.append("<h2>Rows of each class</h2>")
        parts.append(bars(list(report.classes)[:60], [list(report.classes.values())[:60]], ("rows",)))
    if report.columns:
        judged = [c for c in report.columns if c.auroc is not None][:60]
        names = [c.name for c in judged]
        parts += ["<h2>Columns</h2>", html_table(COLUMNS, column_rows(report))]
        if judged:
            parts.append(bars(names, [[c.auroc or 0.0 for c in judged]], ("AUROC of a column alone",)))
        parts.append(
            bars([c.name for c in report.columns][:60], [[c.gaps for c in report.columns][:60]], ("share of gaps",))
        )
    if report.clients:
        names = [c.name for c in report.clients][:60]
        sizes = [[c.train for c in report.clients][:60], [c.test for c in report.clients][:60]]
        parts += [
            "<h2>Clients</h2>",
            html_table(CLIENTS, client_rows(report)),
            bars(names, sizes, ("training rows", "test rows")),
        ]
        areas = [[c.auroc or 0.5 for c in report.clients][:60]]
        parts += [
            bars(names, areas, ("AUROC of its rows",)),
            bars(names, [[c.kl for c in report.clients][:60]], ("label KL",)),
        ]
    parts += [f"<p>{escape(line)}</p>" for line in LEGEND]
    return PAGE.format(title=escape(report.name), body="\n".join(parts))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}}
table{{border-collapse:collapse}}td,th{{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}}
svg{{max-width:100%;height:auto}}
th{{border-bottom:1px solid #ccc}}</style></head><body>
{body}
</body></html>
"""


def html_table(header: Sequence[str], rows: Rows) -> str:
    """The same as HTML."""
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def bars(names: Sequence[str], series: Sequence[Sequence[float]], labels: Sequence[str]) -> str:
    """A bar chart as SVG text."""
    figure = Figure(figsize=(8, 0.6 + 0.22 * len(names) * len(series)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    height = 0.8 / len(series)
    for at, (values, label) in enumerate(zip(series, labels, strict=True)):
        axes.barh([k + at * height for k in range(len(names))], values, height=height, label=label)
    axes.set_yticks(
        [k + (len(series) - 1) * height / 2 for k in range(len(names))], [name[:40] for name in names], fontsize=8
    )
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
