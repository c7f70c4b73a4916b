"""Partition rules: how rows are divided among clients. A rule is a function `(labels | groups, clients, rng, parameters) -> parts`.

To add a rule, write the function and decorate it. Its name on the command line, its parameters in `name:arg:arg` and its line in
`kilter partitions` come from the function. Rules use only methods that numpy's Generator and RandomState share.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from kilter.data.partition_rules import Parts, Rng, describe, partition
from kilter.errors import Mistake

Labels = NDArray[np.int64]  # class of each row
Groups = NDArray[np.int64]  # natural client of each row; negative: none

TRIES = 500  # draws before a minimum counts as impossible


def positive(**values: float) -> None:
    """Check that every value is a finite number above 0."""
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise Mistake(f"{name} must be a number above 0, not {value:g}.")


def until(draw: Callable[[], Parts], rows: int, clients: int, least: int) -> Parts:
    """Repeat a draw until every client has `least` rows."""
    if clients * least > rows:
        raise Mistake(
            f"{clients} clients with at least {least} rows each need {clients * least} rows, but there are {rows}: "
            "use fewer clients, or a lower `least` (`kilter partitions` shows how)."
        )
    for _ in range(TRIES):
        parts = draw()
        if min(map(len, parts)) >= least:
            return parts
    raise Mistake(
        f"No draw in {TRIES} gave each of {clients} clients at least {least} of the {rows} rows: "
        "use fewer clients, a lower `least` (`kilter partitions` shows how) or less skew (a larger alpha)."
    )


def dirichlet_share(rng: Rng, alpha: float, open_: NDArray[np.bool_]) -> NDArray[np.float64]:
    """q ~ Dir(alpha 1), zero where not open, renormalised; redrawn if all of it is zero, and uniform if that fails too."""
    for _ in range(100):
        q = np.where(open_, rng.dirichlet(np.full(len(open_), alpha)), 0.0)
        total = q.sum()
        if isfinite(total) and total > 0:
            return np.asarray(q / total, dtype=np.float64)
    return np.asarray(open_ / open_.sum(), dtype=np.float64)


def by_class(labels: Labels, clients: int, rng: Rng, alpha: float, cap: float) -> Parts:
    """For each class in order: shuffle, q ~ Dir(alpha 1_K), 0 for clients with >= cap rows, cut at floor(cumsum(q) n_c)."""
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        rng.shuffle(rows)
        q = dirichlet_share(rng, alpha, sizes < cap)
        for part, piece in zip(parts, np.split(rows, (np.cumsum(q) * len(rows)).astype(int)[:-1]), strict=True):
            part.append(piece)
        sizes = np.array([sum(map(len, part)) for part in parts])
    return [np.concatenate(part).astype(np.int64) for part in parts]


def by_client(
    labels: Labels, clients: int, rng: Rng, alphas: NDArray[np.float64], shares: NDArray[np.float64] | None = None
) -> Parts:
    """Equal sizes, or these shares of the rows. Client k draws pi_k ~ Dir(alpha_k 1_C); in random order,
    clients then draw classes ~ pi_k without replacement.

    Exhausted classes are removed from every prior, which is renormalised over the classes that still have rows.
    """
    names, y = np.unique(labels, return_inverse=True)
    stacks = [list(rng.permutation(np.flatnonzero(y == c))) for c in range(len(names))]
    left = np.array([len(stack) > 0 for stack in stacks])
    priors = np.stack([dirichlet_share(rng, a, np.ones(len(names), dtype=bool)) for a in alphas])

    def cumulative_priors() -> NDArray[np.float64]:  # (K, C) cumulative priors over the remaining classes
        open_ = priors * left
        empty = open_.sum(axis=1) <= 0  # the prior covers only exhausted classes: take any remaining class
        open_[empty] = left
        steps = np.cumsum(open_, axis=1)
        return np.asarray(steps / steps[:, -1:], dtype=np.float64)

    owners = np.arange(len(y)) % clients
    if shares is not None:
        owners = np.searchsorted(np.cumsum(shares) * len(y), np.arange(len(y)), side="right").clip(0, clients - 1)
    turns = rng.permutation(owners)
    draws = rng.uniform(size=len(y))
    parts: list[list[int]] = [[] for _ in range(clients)]
    cumulative = cumulative_priors()
    for k, u in zip(turns, draws, strict=True):
        c = int(np.searchsorted(cumulative[k], u, side="right"))
        parts[k].append(int(stacks[c].pop()))
        if not stacks[c]:
            left[c] = False
            cumulative = cumulative_priors() if left.any() else cumulative
    return [np.array(part, dtype=np.int64) for part in parts]


@partition("iid")
def iid(labels: Labels, clients: int, rng: Rng) -> Parts:
    """Equal random parts."""
    return [part.astype(np.int64) for part in np.array_split(rng.permutation(len(labels)), clients)]


@partition("dirichlet")
def dirichlet(labels: Labels, clients: int, rng: Rng, alpha: float = 0.5, least: int = 10) -> Parts:
    """Each class by Dir(alpha) over the clients with fewer than N/K rows; redrawn until all have `least` (MOON, FedPDC)."""
    positive(alpha=alpha)
    cap = len(labels) / clients
    return until(lambda: by_class(labels, clients, rng, alpha, cap), len(labels), clients, least)


@partition("dirichlet-plain")
def dirichlet_plain(labels: Labels, clients: int, rng: Rng, alpha: float = 0.5, least: int = 1) -> Parts:
    """Each class by Dir(alpha) over all clients, any sizes (Sattler); redrawn until all have `least`."""
    positive(alpha=alpha)
    return until(lambda: by_class(labels, clients, rng, alpha, np.inf), len(labels), clients, least)


@partition("dirichlet-client")
def dirichlet_client(labels: Labels, clients: int, rng: Rng, alpha: float = 0.3) -> Parts:
    """Equal sizes; each client draws its own class prior from Dir(alpha) and samples without replacement (FedDC)."""
    positive(alpha=alpha)
    return by_client(labels, clients, rng, np.full(clients, alpha))


@partition("dirichlet-mixed")
def dirichlet_mixed(
    labels: Labels,
    clients: int,
    rng: Rng,
    alpha: float = 0.5,
    share: float = 0.8,
    mild: float = 50.0,
    sizes: float = 0.0,
) -> Parts:
    """Like dirichlet-client, with `alpha` for the last `share` of the clients and `mild` for the others (FedEP).

    With `sizes`, the clients' sizes are drawn from Dir(sizes) until all have ten rows.
    """
    positive(alpha=alpha, mild=mild)
    if not (sizes >= 0 and isfinite(sizes)):
        raise Mistake(f"sizes must be a finite number of at least 0 (0: equal sizes), not {sizes:g}.")
    if not 0 <= share <= 1:
        raise Mistake(f"share must be between 0 and 1, not {share:g}.")
    skewed = round(share * clients)
    alphas = np.array([mild] * (clients - skewed) + [alpha] * skewed)
    if not sizes:
        return by_client(labels, clients, rng, alphas)
    everyone = np.ones(clients, dtype=bool)
    return until(
        lambda: by_client(labels, clients, rng, alphas, dirichlet_share(rng, sizes, everyone)),
        len(labels),
        clients,
        least=10,
    )


@partition("dirichlet-cluster")
def dirichlet_cluster(
    labels: Labels, clients: int, rng: Rng, alpha: float = 0.4, clusters: int = 0, least: int = 1
) -> Parts:
    """Classes in `clusters` random groups (0: one for each class); each group by multinomial counts from Dir(alpha) (FedEM)."""
    positive(alpha=alpha)
    names = np.unique(labels)
    if not 0 <= clusters <= len(names):
        raise Mistake(f"clusters must be between 0 and {len(names)}, the number of classes, not {clusters}.")

    def draw() -> Parts:
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
        for group in np.array_split(rng.permutation(names), clusters or len(names)):
            rows = rng.permutation(np.flatnonzero(np.isin(labels, group)))
            q = dirichlet_share(rng, alpha, np.ones(clients, dtype=bool))
            counts = rng.multinomial(len(rows), q)
            for part, piece in zip(parts, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
                part.append(piece)
        return [np.concatenate(part).astype(np.int64) for part in parts]

    return until(draw, len(labels), clients, least)


@partition("shards")
def shards(labels: Labels, clients: int, rng: Rng, each: int = 2) -> Parts:
    """Rows sorted by class and cut into K * `each` shards; every client gets `each` of them (McMahan)."""
    if each < 1 or clients * each > len(labels):
        raise Mistake(f"{clients} clients x {each} shards must be between 1 and {len(labels)}, the number of rows.")
    mixed = rng.permutation(len(labels))
    pieces = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], clients * each)
    deal = rng.permutation(clients * each).reshape(clients, each)
    return [np.concatenate([pieces[s] for s in hand]).astype(np.int64) for hand in deal]


@partition("quantity")
def quantity(labels: Labels, clients: int, rng: Rng, alpha: float = 0.5, least: int = 10) -> Parts:
    """IID labels, sizes by Dir(alpha); redrawn until all have `least` (NIID-Bench)."""
    positive(alpha=alpha)
    rows = rng.permutation(len(labels)).astype(np.int64)
    everyone = np.ones(clients, dtype=bool)

    def draw() -> Parts:
        cuts = (np.cumsum(dirichlet_share(rng, alpha, everyone)) * len(rows)).astype(int)[:-1]
        return list(np.split(rows, cuts))

    return until(draw, len(labels), clients, least)


def noise_std(k: int, level: float, clients: int, is_std: bool = False) -> float:
    """Standard deviation of client k's noise: sqrt(k level / K), or k level / K with `is_std`."""
    return k * level / clients if is_std else sqrt(k * level / clients)


@partition("noise", noise=True)
def noise(labels: Labels, clients: int, rng: Rng, level: float = 0.3, is_std: bool = False) -> Parts:
    """Equal random parts; Gaussian noise of variance (or std) k level / K on client k's features (FedDisk)."""
    if not (level >= 0 and isfinite(noise_std(clients, level, clients, is_std))):
        raise Mistake(f"level must be a finite number of at least 0, not {level:g}.")
    return iid(labels, clients, rng)


@partition("natural", named=True)
def natural(groups: Groups, clients: int, rng: Rng, least: int = 1) -> Parts:
    """One client for each writer, source or hospital with at least `least` training rows; fewer clients: a random choice."""
    names, sizes = np.unique(groups[groups >= 0], return_counts=True)
    names = names[sizes >= max(least, 1)]
    if clients > len(names) or len(names) == 0:
        raise Mistake(
            f"There are {len(names)} natural clients with at least {max(least, 1)} rows, but {clients} were requested: "
            "use fewer clients (0: all of them), or a lower `least` (`kilter partitions` shows how)."
        )
    chosen = np.sort(rng.permutation(names)[: clients or len(names)])
    return [np.flatnonzero(groups == g).astype(np.int64) for g in chosen]


@partition("sources")
def sources(groups: Groups, clients: int, rng: Rng) -> Parts:
    """Each client from one source, clients assigned to sources by size; fewer clients than sources: a random choice."""
    names, sizes = np.unique(groups[groups >= 0], return_counts=True)
    clients = clients or len(names)
    if clients < len(names):
        chosen = np.sort(rng.permutation(len(names))[:clients])
        names, sizes = names[chosen], sizes[chosen]
    if clients > sizes.sum():
        raise Mistake(f"{clients} clients cannot share {sizes.sum()} rows: ask for fewer clients.")
    seats = np.ones(len(names), dtype=np.int64)
    while seats.sum() < clients:
        seats[np.argmax(sizes / seats)] += 1  # the next client goes where clients are largest
    parts: Parts = []
    for group, count in zip(names, seats, strict=True):
        parts += [p.astype(np.int64) for p in np.array_split(rng.permutation(np.flatnonzero(groups == group)), count)]
    return parts


DIST = {  # rows of each of ten classes, most frequent first
    0: (2000,) * 3 + (1500,) * 2 + (1000,) * 2 + (5,) * 3,
    1: (2500,) * 3 + (5,) * 7,
    2: (2000,) * 7 + (5,) * 3,
    4: (2000,) * 10,  # the even clients of Dist-3
}
MIXTURE = (
    (0, 8),
    (1, 7),
    (2, 7),
    (4, 8),
    (5, 20),
)  # Dist-3: how many of 50 clients follow which; 5 is U{1..4000} a class


def dist3_kinds(clients: int) -> list[int]:
    """Which distribution each client of Dist-3 follows: 8 + 7 + 7 + 8 + 20 of 50, by largest remainder of K."""
    exact = np.array([count * clients / 50 for _, count in MIXTURE])
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: clients - counts.sum()]] += 1
    return [kind for (kind, _), count in zip(MIXTURE, counts, strict=True) for _ in range(count)]


@partition("slfed", repeats=True)
def slfed(labels: Labels, clients: int, rng: Rng, dist: int = 0, scale: float = 1.0) -> Parts:
    """SLFed's Dist-`dist` (0..3) with counts times `scale`; random classes; clients share rows.

    Dist-0: 3 x 2000 + 2 x 1500 + 2 x 1000 + 3 x 5; 1: 3 x 2500 + 7 x 5; 2: 7 x 2000 + 3 x 5; 3: a mixture of these with
    even (2000 each) and random (U{1..4000}) clients. With C classes instead of ten, the r-th class counts as the
    floor(10 r / C)-th of ten. No client holds a row twice.
    """
    positive(scale=scale)
    if dist not in (0, 1, 2, 3):
        raise Mistake(f"dist must be 0, 1, 2 or 3, not {dist}.")
    names, sizes = np.unique(labels, return_counts=True)
    ranks = np.arange(len(names)) * 10 // len(names)
    most = round(scale * (4000 if dist == 3 else max(DIST[dist])))
    if most > sizes.min():
        fits = sizes.min() * scale / most
        digits = 10.0 ** (np.floor(np.log10(fits)) - 1)
        fits = np.floor(fits / digits) * digits  # two digits, rounded down
        raise Mistake(
            f"slfed:{dist} takes up to {most} rows of a class and the smallest class has {sizes.min()}: "
            f"use a scale of {fits:g} or less, as in slfed:{dist}:{fits:g}."
        )
    rows = [np.flatnonzero(labels == c) for c in names]
    parts: Parts = []
    for kind in dist3_kinds(clients) if dist == 3 else [dist] * clients:
        if kind == 5:
            counts = 1 + np.floor(rng.uniform(size=len(names)) * 4000)
        else:
            counts = np.array(DIST[kind])[ranks][rng.permutation(len(names))]
        take = np.maximum(1, np.round(scale * counts)).astype(int)
        parts.append(np.concatenate([rng.permutation(r)[:t] for r, t in zip(rows, take, strict=True)]).astype(np.int64))
    return parts


@partition("fedsbme", public=0.2, public_test=0.1, test=3 / 7)
def fedsbme(labels: Labels, clients: int, rng: Rng, alpha: float = 0.5, least: int = 10) -> Parts:
    """20 % for the server's training, 10 % for its test, the rest like `dirichlet`, split 4:3 into train and test (FEDSBME)."""
    return dirichlet(labels, clients, rng, alpha, least)


PARTITIONS = describe()
