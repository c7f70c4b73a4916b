"""Look at the data of real sites through what they share: statistics of columns, and counts of labels. No row leaves a site.

A site sees its own data in full with `kilter inspect`. It shares what its policy allows: statistics, of as many rows as it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from kilter.data.preparation import Plain
from kilter.data.schema import MINIMUM, Column, Schema
from kilter.data.skew import of_counts
from kilter.data.statistics import ColumnStatistics, pool

FAR = 1.0  # a mean that is more standard deviations away is worth a warning
FAR_FROM_OTHERS = 5.0  # likewise, from the mean of the other sites, in the largest deviation of a site
FEW_ROWS = 20  # a site with fewer labelled training rows is worth a warning


@dataclass(frozen=True)
class SharedColumn:
    """One column at one site, as far as it is shared."""

    site: str
    column: str
    kind: str
    gaps: float | None  # share of the site's training rows; None: not known
    mean: float | None
    std: float | None
    distance: float | None  # between the means here and of all sites, in standard deviations of all rows
    values: int | None  # of a category: how many are shared


@dataclass(frozen=True)
class SharedSite:
    """One site, as far as it is shared."""

    name: str
    rows: int  # training rows with a label
    labels: dict[str, int]  # rows of each class that has enough of them
    entropy: float | None
    kl: float | None
    js: float | None


@dataclass(frozen=True)
class FederatedInspection:
    """Everything that `kilter serve --inspect` shows."""

    sites: list[SharedSite]
    columns: list[SharedColumn]
    warnings: list[str]

    def plain(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


def with_label_counts(schema: Schema) -> Schema:
    """The schema with statistics of the labels: how many rows each class has, if they are enough."""
    if schema.task:
        return schema
    return replace(schema, targets=(Column(schema.target, "category", least=MINIMUM),))


def inspect_sites(schema: Schema, parts: Mapping[str, Plain]) -> FederatedInspection:
    """What the statistics of the sites show."""
    statistics = {site: _parse(plain) for site, plain in parts.items()}
    pooled = pool(list(statistics.values()))
    sites = _sites(schema, statistics)
    rows = {site.name: site.rows for site in sites}
    columns = [
        _column(site, column, known[column.name], pooled[column.name], rows[site])
        for column in schema.columns
        for site, known in statistics.items()
    ]
    return FederatedInspection(sites, columns, [*_site_warnings(sites), *_column_warnings(columns)])


def _parse(plain: Plain) -> dict[str, ColumnStatistics]:
    columns = plain["columns"]
    assert isinstance(columns, Mapping)
    return {str(name): ColumnStatistics.parse(column) for name, column in columns.items()}


def _sites(schema: Schema, statistics: Mapping[str, Mapping[str, ColumnStatistics]]) -> list[SharedSite]:
    """Rows and labels of the sites; without counts of labels, the rows of the fullest column."""
    labels = {
        site: dict(known[schema.target].values) if schema.target in known else {} for site, known in statistics.items()
    }
    counts = np.array([[labels[site].get(c, 0) for c in schema.classes] for site in statistics], dtype=np.int64)
    skew = of_counts(list(statistics), counts) if not schema.task and (counts.sum(1) > 0).all() else None
    sites = []
    for at, (site, known) in enumerate(statistics.items()):
        client = skew.clients[at] if skew else None
        fullest = max((known[c.name].count for c in schema.measured if c.name in known), default=0)
        measures = (client.entropy, client.kl, client.js) if client else (None, None, None)
        sites.append(SharedSite(site, fullest, labels[site] if not schema.task else {}, *measures))
    return sites


def _column(site: str, column: Column, known: ColumnStatistics, pooled: ColumnStatistics, rows: int) -> SharedColumn:
    gaps = None if not rows else 1 - min(known.count / rows, 1.0)
    if column.kind not in ("number", "date") or not known.count:
        values = len(known.values) if column.kind == "category" else None
        return SharedColumn(site, column.name, column.kind, gaps, None, None, None, values)
    distance = abs(known.mean - pooled.mean) / pooled.std if pooled.std else 0.0
    return SharedColumn(site, column.name, column.kind, gaps, known.mean, known.std, distance, None)


def _site_warnings(sites: Sequence[SharedSite]) -> list[str]:
    messages = []
    total = sum(site.rows for site in sites)
    for site in sites:
        if len(site.labels) == 1:
            messages.append(f"{site.name} has enough rows of one class only.")
        if site.rows < FEW_ROWS:
            messages.append(f"{site.name} has only {site.rows} training rows.")
        if len(sites) > 1 and site.rows > 0.8 * total:
            messages.append(f"{site.name} holds {site.rows / total:.0%} of the training rows.")
    return messages


def _column_warnings(columns: Sequence[SharedColumn]) -> list[str]:
    messages = []
    for column in columns:
        if column.gaps is not None and column.gaps >= 1:
            messages.append(f"`{column.column}` has no values at {column.site}, or too few to share.")
        elif column.mean is not None and (column.distance or 0.0) > FAR:
            messages.append(
                f"The mean of `{column.column}` at {column.site} is {column.distance:.1f} standard deviations from that of all "
                "sites: is it in the same unit?"
            )
        elif others := _far_from_others(column, columns):
            messages.append(
                f"The mean of `{column.column}` is {column.mean:.3g} at {column.site} and {others:.3g} at the other sites: is it "
                "in the same unit?"
            )
    return messages


def _far_from_others(column: SharedColumn, columns: Sequence[SharedColumn]) -> float | None:
    """The mean at the other sites, if it differs by more than any site varies. With few sites, the pooled deviation hides this."""
    others = [c for c in columns if c.column == column.column and c.site != column.site and c.mean is not None]
    if column.mean is None or not others:
        return None
    mean = float(np.mean([c.mean for c in others]))
    widest = max(c.std or 0.0 for c in (column, *others))
    return mean if widest and abs(column.mean - mean) > FAR_FROM_OTHERS * widest else None
