"""Look at data before training: columns, clients, skew, duplicates, and columns that give the label away."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict

from kilter.core import as_float
from kilter.data.columns import Parsed
from kilter.data.datasets import Dataset
from kilter.data.explain import only_other
from kilter.data.mapped import release
from kilter.data.preparation import Preparation
from kilter.data.skew import Skew, measure
from kilter.data.split import Split, split

LEAK = 0.99  # a column whose AUROC alone is at least this gives the label away
GAPS = 0.3  # a column with a larger share of gaps is worth a warning
FEW_ROWS = 20  # a client or class with fewer rows is worth a warning
DIFFERENT = 0.9  # a client whose rows a classifier recognises with this AUROC has features of its own
SAMPLE = 1000  # rows of each client that the two-sample test looks at
MOST_TESTED = 30  # clients that the two-sample test looks at
DIMENSIONS = 64  # wider rows are projected to this many numbers for the two-sample test
SMALLEST_PICTURE = 24  # pixels; smaller images have too few details for a perceptual hash
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class ColumnReport:
    """What one column of a table holds."""

    name: str
    kind: str
    gaps: float  # share of rows
    distinct: int
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    auroc: float | None = None  # how well this column alone separates the classes: 0.5 not at all, 1 perfectly


@dataclass(frozen=True)
class ClientOverview:
    """What one client holds."""

    name: str
    train: int
    test: int
    classes: int
    gaps: float  # share of the cells of a table
    entropy: float
    kl: float
    js: float
    auroc: float | None  # of a classifier that tells its rows from those of others: 0.5, they look the same


@dataclass(frozen=True)
class Duplicates:
    """Rows that occur more than once."""

    within: int  # rows that repeat an earlier one
    train_test: int  # test rows that are also training rows
    clients: int  # rows that several clients hold
    similar: int | None  # test images that look like a training image; None: not measured


@dataclass(frozen=True)
class Inspection:
    """Everything that `kilter inspect` shows."""

    name: str
    shape: tuple[int, ...]
    train: int
    test: int
    classes: dict[str, int]  # rows of each class or label; empty where the target is none
    columns: list[ColumnReport]
    clients: list[ClientOverview]
    skew: dict[str, float | int | None]  # empty if the data names no clients
    duplicates: Duplicates
    warnings: list[str]
    task: str = ""  # what the target is, where it is not a class

    def plain(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


def inspect(dataset: Dataset) -> Inspection:
    """Inspect a data set; clients are those that the data names."""
    parts = split(dataset, "natural", 0) if dataset.groups is not None and _enough(dataset) else None
    columns = inspect_columns(dataset)
    clients, skew = ([], None) if parts is None else inspect_clients(parts)
    duplicates = find_duplicates(dataset)
    report = Inspection(
        name=dataset.name,
        shape=tuple(dataset.x.shape[1:]),
        train=len(dataset.train),
        test=len(dataset.test),
        classes=count_classes(dataset),
        columns=columns,
        clients=clients,
        skew={} if skew is None else {k: v for k, v in asdict(skew).items() if k != "clients"},
        duplicates=duplicates,
        warnings=[],
        task=dataset.task,
    )
    report.warnings.extend([*dataset.notes, *find_warnings(report, dataset)])
    return report


def count_classes(dataset: Dataset) -> dict[str, int]:
    """Rows of each class; rows that have each label; images in which a class is the largest. Numbers have none."""
    if dataset.task in ("regression", "survival", "next-token"):
        return {}
    if dataset.task == "multi-label":
        return dict(zip(dataset.classes, dataset.y.sum(0).long().tolist(), strict=True))
    counts = np.bincount(dataset.labels.numpy(), minlength=len(dataset.label_names))
    return dict(zip(dataset.label_names, counts.tolist(), strict=True))


def _enough(dataset: Dataset) -> bool:
    """Whether every client has training rows, so that the data can be divided by client."""
    assert dataset.groups is not None
    return len(np.unique(dataset.groups[dataset.train].numpy())) == len(dataset.group_names)


# Columns --------------------------------------------------------------------------------------------------------------


def inspect_columns(dataset: Dataset) -> list[ColumnReport]:
    """The columns of a table; none for other data."""
    if dataset.raw is None:
        return []
    y, train = dataset.y.numpy() if dataset.strata is None else None, dataset.train.numpy()
    return [inspect_column(name, parsed, y, train) for name, parsed in dataset.raw.items()]


def inspect_column(name: str, parsed: Parsed, y: Codes | None, train: Codes) -> ColumnReport:
    """Describe one column; without classes `y`, not how well it separates them."""
    cells = parsed.cells
    known = cells >= 0 if parsed.words else np.isfinite(cells)
    gaps = 1 - float(known.mean())
    distinct = len(np.unique(cells[known]))
    auroc = None if y is None or parsed.kind in ("empty", "text") else column_auroc(parsed, y, train)
    if parsed.kind not in ("number", "date") or not known.any():
        return ColumnReport(name, parsed.kind, gaps, distinct, auroc=auroc)
    numbers = cells[known]
    low, high, mean = float(numbers.min()), float(numbers.max()), float(numbers.mean())
    return ColumnReport(name, parsed.kind, gaps, distinct, low, high, mean, auroc)


def column_auroc(parsed: Parsed, y: Codes, rows: Codes) -> float | None:
    """The largest AUROC of one column for one class against the others, in either direction. Gaps count as a value of their own."""
    cells, labels = parsed.cells[rows], y[rows]
    best: float | None = None
    for c in np.unique(labels):
        is_class = labels == c
        if is_class.all() or not is_class.any():
            continue
        for score in _scores(parsed, cells, is_class):
            if len(np.unique(score)) > 1:
                area = float(roc_auc_score(is_class, score))
                best = max(best or 0.5, area, 1 - area)
    return best


def _scores(
    parsed: Parsed, cells: Codes | NDArray[np.int32] | NDArray[np.float64], is_class: NDArray[np.bool_]
) -> Iterable[NDArray[np.float64]]:
    """Numbers and their gaps as they are; a word scores the share of the class in the other half of the rows that have it."""
    if not parsed.words:
        gap = ~np.isfinite(cells)
        yield np.where(gap, np.nanmedian(cells) if not gap.all() else 0.0, cells).astype(np.float64)
        yield gap.astype(np.float64)
        return
    codes = cells.astype(np.int64) + 1
    score = np.full(len(codes), is_class.mean())
    half = np.arange(len(codes)) % 2 == 0
    for mine, others in ((half, ~half), (~half, half)):
        total = np.bincount(codes[others], minlength=len(parsed.words) + 1)
        hits = np.bincount(codes[others], weights=is_class[others], minlength=len(parsed.words) + 1)
        score[mine] = ((hits + is_class.mean()) / (total + 1))[codes[mine]]
    yield score


# Clients --------------------------------------------------------------------------------------------------------------


def inspect_clients(parts: Split) -> tuple[list[ClientOverview], Skew]:
    """The natural clients, and the skew between them."""
    skew = measure(parts)
    rows = {name: torch.cat([d.train.index, d.valid.index]).numpy() for name, d in parts.clients.items()}
    areas = two_sample_test(parts.dataset, list(rows.values()))
    raw = parts.dataset.raw
    overviews = []
    for (name, data), client, area in zip(parts.clients.items(), skew.clients, areas, strict=True):
        shares = [_gap_share(parsed, rows[name]) for parsed in raw.values()] if raw else [0.0]
        overviews.append(
            ClientOverview(
                name,
                len(rows[name]),
                len(data.test),
                client.classes,
                float(np.mean(shares)),
                client.entropy,
                client.kl,
                client.js,
                area,
            )
        )
    return overviews, skew


def _gap_share(parsed: Parsed, rows: Codes) -> float:
    cells = parsed.cells[rows]
    return float((cells < 0).mean() if parsed.words else (~np.isfinite(cells)).mean())


def two_sample_test(dataset: Dataset, clients: Sequence[Codes]) -> list[float | None]:
    """For each client, the AUROC of a linear classifier that tells its rows from those of the others, on rows it has not seen."""
    if len(clients) < 2:
        return [None] * len(clients)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(rows)[:SAMPLE] for rows in clients]
    owner = np.repeat(np.arange(len(clients)), [len(rows) for rows in chosen])
    x = as_float(dataset.x[torch.from_numpy(np.concatenate(chosen))]).flatten(1).numpy().astype(np.float64)
    if x.shape[1] > DIMENSIONS:
        x = x @ rng.normal(size=(x.shape[1], DIMENSIONS)) / np.sqrt(x.shape[1])
    x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    areas: list[float | None] = []
    for k in range(len(clients)):
        mine = owner == k
        if k >= MOST_TESTED or mine.sum() < 5:
            areas.append(None)
            continue
        others = np.flatnonzero(~mine)
        some = np.concatenate([np.flatnonzero(mine), rng.permutation(others)[: max(2 * int(mine.sum()), 100)]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(max_iter=100, class_weight="balanced")
            score = cross_val_predict(model, x[some], mine[some], cv=3, method="decision_function")
        areas.append(float(roc_auc_score(mine[some], score)))
    return areas


# Duplicates -----------------------------------------------------------------------------------------------------------


def find_duplicates(dataset: Dataset) -> Duplicates:
    """Rows with the same values; and images that look alike, if they are large enough to tell."""
    digests = row_digests(dataset)
    in_test = np.zeros(len(digests), dtype=bool)
    in_test[dataset.test.numpy()] = True
    groups = None if dataset.groups is None else dataset.groups.numpy()
    trained = {digest for digest, test in zip(digests, in_test, strict=True) if not test}
    owners: dict[bytes, set[int]] = {}
    for at, digest in enumerate(digests):
        owners.setdefault(digest, set()).add(0 if groups is None else int(groups[at]))
    shared = {digest for digest, clients in owners.items() if len(clients) > 1}
    similar = None
    if dataset.x.ndim == 4 and min(dataset.x.shape[2:]) >= SMALLEST_PICTURE:
        hashes = perceptual_hashes(dataset)
        known = set(hashes[~in_test].tolist())
        similar = sum(value in known for value in hashes[in_test].tolist())
    return Duplicates(
        within=len(digests) - len(owners),
        train_test=sum(digest in trained for digest, test in zip(digests, in_test, strict=True) if test),
        clients=sum(digest in shared for digest in digests),
        similar=similar,
    )


def row_digests(dataset: Dataset) -> list[bytes]:
    """A digest of each row's values, without its label."""
    digests = []
    for start in range(0, len(dataset.y), 4096):
        part = dataset.x[start : start + 4096].contiguous().numpy()
        release(dataset.x)
        digests += [blake2b(row.tobytes(), digest_size=16).digest() for row in part]
    return digests


def perceptual_hashes(dataset: Dataset) -> NDArray[np.uint64]:
    """64 bits of each image that stay the same if it is resized, recompressed or made a little lighter (dHash)."""
    hashes = []
    weights = 2 ** np.arange(64, dtype=np.uint64)
    for start in range(0, len(dataset.y), 1024):
        grey = as_float(dataset.x[start : start + 1024]).mean(1, keepdim=True)
        release(dataset.x)
        small = torch.nn.functional.adaptive_avg_pool2d(grey, (8, 9))[:, 0]
        bits = (small[:, :, 1:] > small[:, :, :-1]).flatten(1).numpy()
        hashes.append((bits * weights).sum(1, dtype=np.uint64))
    return np.concatenate(hashes)


# Warnings -------------------------------------------------------------------------------------------------------------


def find_warnings(report: Inspection, dataset: Dataset) -> list[str]:
    """What may harm training, in plain words."""
    messages = []
    for column in report.columns:
        if column.auroc is not None and column.auroc >= LEAK:
            messages.append(
                f"`{column.name}` alone predicts the label (AUROC {column.auroc:.2f}): is it known beforehand?"
            )
        if column.distinct == 0 or (column.distinct == 1 and column.gaps == 0):
            what = "no values" if column.distinct == 0 else "the same value in every row"
            messages.append(f"`{column.name}` has {what}: leave it out (--drop {column.name}).")
        elif column.gaps > GAPS:
            messages.append(f"`{column.name}` is empty in {column.gaps:.0%} of the rows.")
    for name in only_other(dataset.preparation) if isinstance(dataset.preparation, Preparation) else ():
        messages.append(f"No value of `{name}` occurs in enough training rows: all count as 'other'.")
    for name, parsed in (dataset.raw or {}).items():
        is_target = dataset.schema is not None and name in {c.name for c in dataset.schema.targets}
        if parsed.kind == "number" and not is_target and name in {c.name for c in report.columns if c.distinct > 1}:
            messages += _number_warnings(name, parsed.cells)
    trained = Counter(dataset.labels[dataset.train].tolist())
    for number, name in enumerate(dataset.classes if dataset.strata is None else ()):
        if trained[number] == 0:
            messages.append(f"Nobody has training rows of class '{name}'.")
        elif trained[number] < FEW_ROWS:
            messages.append(f"Class '{name}' has only {trained[number]} training rows.")
    messages += _client_warnings(report.clients)
    if dataset.groups is not None and not report.clients:
        missing = set(range(len(dataset.group_names))) - set(dataset.groups[dataset.train].tolist())
        names = ", ".join(dataset.group_names[g] for g in sorted(missing)[:5])
        messages.append(f"Clients without training rows: {names}.")
    copies = report.duplicates
    if copies.train_test:
        messages.append(
            f"{copies.train_test} test rows are also training rows: results will look better than they are."
        )
    if copies.similar is not None and copies.similar > copies.train_test:
        messages.append(
            f"{copies.similar} test images look like a training image: check whether they show the same thing."
        )
    if copies.clients:
        messages.append(f"{copies.clients} rows occur at several clients.")
    return messages


def _number_warnings(name: str, cells: Codes | NDArray[np.int32] | NDArray[np.float64]) -> list[str]:
    """Whole numbers that are no measurements: dates without separators, and numbers of rows."""
    numbers = cells[np.isfinite(cells)]
    if (numbers != np.floor(numbers)).any():
        return []
    month, day = numbers // 100 % 100, numbers % 100
    if ((numbers > 1900_00_00) & (numbers < 2100_00_00) & (month > 0) & (month < 13) & (day > 0) & (day < 32)).all():
        return [f"`{name}` holds numbers like {numbers[0]:.0f}: write them as 2024-03-31 if they are dates."]
    if len(numbers) >= FEW_ROWS and len(np.unique(numbers)) == len(cells):
        return [f"`{name}` has another whole number in every row: leave it out if it numbers them (--drop {name})."]
    return []


def _client_warnings(clients: Sequence[ClientOverview]) -> list[str]:
    messages = []
    rows = sum(client.train for client in clients)
    for client in clients:
        if client.classes == 1:
            messages.append(f"{client.name} has one class.")
        if client.train < FEW_ROWS:
            messages.append(f"{client.name} has only {client.train} training rows.")
        if client.test == 0:
            messages.append(f"{client.name} has no test rows: it will not be evaluated.")
        if len(clients) > 1 and client.train > 0.8 * rows:
            messages.append(f"{client.name} holds {client.train / rows:.0%} of the training rows.")
    different = [f"{c.name} (AUROC {c.auroc:.2f})" for c in clients if c.auroc is not None and c.auroc >= DIFFERENT]
    if different:
        shown = ", ".join(different[:5]) + (" and others" if len(different) > 5 else "")
        messages.append(f"The features of clients differ: a classifier recognises the rows of {shown}.")
    return messages
