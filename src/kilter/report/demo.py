"""The table of `kilter demo`: one line per method, narrow enough for a terminal of 80 columns."""

from __future__ import annotations

from rich.table import Table

from kilter.records.display import size
from kilter.study.results import Results

PURPOSE = {
    "fedavg": "baseline: average of all clients",
    "feddisk": "weights rows by density ratios",
    "slfed": "peers choose whom to trust; own models",
    "fedpdc": "public rows score clients' models",
    "fedsbme": "server trains an ensemble",
    "fedep": "weights clients by label divergence",
    "solo": "bound: no federation",
    "pooled": "bound: all data in one place",
}
EXPLANATION = (
    "Global is the accuracy on all classes, own the mean over the clients' own test rows, which are mostly of the client's own "
    "classes; both in %, mean and standard deviation over the seeds. "
    "A method for personal models (slfed, solo) should be judged by own, a method for one shared model by global. "
    "Every method chose its learning rate on validation rows, with the same number of trials."
)


def demo_table(results: Results) -> Table:
    """Accuracy and traffic of each method."""
    (cell,) = results.cells
    table = Table("method", title=f"{cell.cell.name}, {len(results.study.seeds)} seeds", title_justify="left", box=None)
    for heading in ("global", "own", "traffic"):
        table.add_column(heading, justify="right")
    table.add_column("what it does")
    for line in cell.lines:
        traffic = line.mean("bytes")
        cells = [_percent(line.over_seeds(measure)) for measure in ("global", "client")]
        table.add_row(line.label, *cells, size(traffic or 0), PURPOSE.get(line.label, ""))
    return table


def _percent(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return "-"
    mean, std = value
    return f"{100 * mean:.1f} ± {100 * (std or 0):.1f}"
