"""The result of `kilter serve --inspect`: tables for the terminal, and a page."""

from __future__ import annotations

from html import escape

from rich.console import RenderableType
from rich.text import Text

from kilter.data.federated_inspection import FederatedInspection
from kilter.report.inspection import PAGE, Rows, grid, html_table, number

TITLE = "Data of the sites"
SITES = ("site", "train", "labels", "entropy", "KL", "JS")
COLUMNS = ("column", "site", "holds", "gaps", "mean", "std", "distance", "values")
LEGEND = (
    "All of this comes from statistics that the sites' policies allow. Values of few rows are left out. No row left a site.",
    "Distance: between the means at the site and of all sites, in standard deviations of all rows.",
    "Entropy, KL and JS: of a site's labels, and their divergence from those of all sites, in nats.",
)


def site_rows(report: FederatedInspection) -> Rows:
    return [
        (
            s.name,
            f"{s.rows:,}",
            ", ".join(f"{label} {count:,}" for label, count in list(s.labels.items())[:8]) or "-",
            *(number(value) for value in (s.entropy, s.kl, s.js)),
        )
        for s in report.sites
    ]


def column_rows(report: FederatedInspection) -> Rows:
    return [
        (
            c.column,
            c.site,
            c.kind,
            "-" if c.gaps is None else f"{c.gaps:.0%}",
            *(number(value) for value in (c.mean, c.std, c.distance)),
            "-" if c.values is None else str(c.values),
        )
        for c in report.columns
    ]


def tables(report: FederatedInspection) -> list[RenderableType]:
    """For the terminal."""
    return [
        Text(TITLE, style="bold"),
        grid(SITES, site_rows(report)),
        "",
        grid(COLUMNS, column_rows(report)[:100]),
        "",
        *(Text(f"Warning: {text}") for text in report.warnings),
        *(Text(line, style="dim") for line in LEGEND),
    ]


def page(report: FederatedInspection) -> str:
    """One HTML file that needs nothing else."""
    warnings = "".join(f"<li>{escape(text)}</li>" for text in report.warnings) or "<li>none</li>"
    parts = [
        f"<h1>{TITLE}</h1>",
        f"<h2>Warnings</h2><ul>{warnings}</ul>",
        "<h2>Sites</h2>",
        html_table(SITES, site_rows(report)),
        "<h2>Columns</h2>",
        html_table(COLUMNS, column_rows(report)),
        *(f"<p>{escape(line)}</p>" for line in LEGEND),
    ]
    return PAGE.format(title=TITLE, body="\n".join(parts))
