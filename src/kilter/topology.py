"""Who may write to whom, and who aggregates. A parameter of the run; methods do not know it.

star                   the server aggregates
rotating               one node aggregates, a different one each round
aggregators:2          several nodes aggregate, each for its group, and exchange their models
full, ring, regular:4, random:0.3, small-world:4:0.1, edges:FILE
                       peers: every node aggregates over itself and its neighbours in the graph
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx

from kilter.errors import Mistake, unknown
from kilter.seeds import derive

TRIES = 100  # random graphs are drawn again until connected


@dataclass(frozen=True)
class Topology:
    """`kind` is star, rotating or peers; `neighbours` says whom each node may write to."""

    spec: str
    kind: str
    neighbours: dict[str, tuple[str, ...]]
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by aggregator, itself first (aggregators:k)

    def group(self, name: str) -> tuple[str, ...]:
        """The group of a node, its aggregator first; empty where there are no groups."""
        return next((group for group in self.groups.values() if name in group), ())

    def aggregator(self, round: int, ids: Sequence[str]) -> str:
        """The node whose turn it is to aggregate in this round (rotating)."""
        return self.turns(round, ids)[0]

    def turns(self, round: int, ids: Sequence[str]) -> tuple[str, ...]:
        """Who aggregates in this round: the first of these that is there (rotating)."""
        first = max(round - 1, 0) % len(ids)
        return (*ids[first:], *ids[:first])


def _connected(draw: Callable[[int], nx.Graph], seed: int, what: str) -> nx.Graph:
    for k in range(TRIES):
        graph = draw(derive(seed, "graph", k) % 2**32)
        if nx.is_connected(graph):
            return graph
    raise Mistake(f"No connected graph resulted from '{what}' in {TRIES} draws: use a denser one.")


def _full(n: int, seed: int) -> nx.Graph:
    """everyone writes to everyone"""
    return nx.complete_graph(n)


def _ring(n: int, seed: int) -> nx.Graph:
    """two neighbours each"""
    return nx.cycle_graph(n) if n > 2 else nx.path_graph(n)


def _regular(n: int, seed: int, degree: int = 4) -> nx.Graph:
    """a random graph in which everyone has `degree` neighbours"""
    if not 0 < degree < n or n * degree % 2:
        raise Mistake(
            f"No graph of {n} nodes has {degree} neighbours each: the degree must be below {n} and their product even."
        )
    return _connected(lambda s: nx.random_regular_graph(degree, n, s), seed, f"regular:{degree}")


def _random(n: int, seed: int, probability: float = 0.3) -> nx.Graph:
    """Erdős–Rényi: every edge with this `probability`"""
    if not 0 <= probability <= 1:
        raise ValueError
    return _connected(lambda s: nx.gnp_random_graph(n, probability, s), seed, f"random:{probability}")


def _small_world(n: int, seed: int, degree: int = 4, rewire: float = 0.1) -> nx.Graph:
    """Watts–Strogatz: a ring of `degree` neighbours, edges moved with probability `rewire`"""
    if not 0 <= rewire <= 1:
        raise ValueError
    if not 1 < degree < n:
        raise Mistake(f"small-world needs 1 < degree < nodes, not {degree} of {n}.")
    return _connected(lambda s: nx.watts_strogatz_graph(n, degree, rewire, s), seed, f"small-world:{degree}:{rewire}")


GRAPHS: dict[str, Callable[..., nx.Graph]] = {
    "full": _full,
    "ring": _ring,
    "regular": _regular,
    "random": _random,
    "small-world": _small_world,
}
TOPOLOGIES = {
    "star": "the server aggregates",
    "rotating": "one node aggregates, another each round",
    "aggregators": "several nodes aggregate, each for its group, and exchange their models (aggregators:2)",
    **{name: f"peers: {draw.__doc__}" for name, draw in GRAPHS.items()},
    "edges": "peers: a text file with one edge a line (edges:FILE)",
}


def _from_file(path: str, ids: Sequence[str]) -> nx.Graph:
    """Two names (or positions) a line; # begins a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise Mistake(
            f"The edge list '{path}' cannot be read: {getattr(e, 'strerror', None) or 'not a text file'}."
        ) from None
    at = {name: k for k, name in enumerate(ids)}
    graph = nx.empty_graph(len(ids))
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        ends = [at.get(w, int(w) if w.isdecimal() and int(w) < len(ids) else None) for w in words]
        if len(ends) != 2 or None in ends or ends[0] == ends[1]:
            raise Mistake(
                f"Line {number} of '{path}' is not an edge between two of the {len(ids)} nodes: '{line.strip()}'."
            )
        graph.add_edge(*ends)
    if not nx.is_connected(graph):
        raise Mistake(f"The graph in '{path}' is not connected: some nodes could never hear of the others.")
    return graph


def usage(name: str) -> str:
    """How to write a topology with its parameters and their defaults.

    >>> usage("small-world")
    'small-world[:degree=4][:rewire=0.1]'
    """
    known = list(inspect.signature(GRAPHS[name]).parameters.values())[2:]
    return name + "".join(f"[:{each.name}={each.default}]" for each in known)


def _in_groups(spec: str, words: Sequence[str], ids: Sequence[str], aggregators: Sequence[str]) -> Topology:
    """Several aggregators, linked to each other and to their groups. Nodes join the groups in turn, in the order of the ids."""
    if len(words) != 1 or not words[0].isdecimal() or not int(words[0]):
        raise Mistake(f"The number of aggregators belongs after the name, such as aggregators:2, not '{spec}'.")
    count = int(words[0])
    chosen = tuple(aggregators) or tuple(ids[:count])
    if len(chosen) < count:
        raise Mistake(f"The topology '{spec}' needs {count} nodes that may aggregate, and there are {len(chosen)}.")
    others = [name for name in ids if name not in chosen]
    groups = {name: (name, *others[k::count]) for k, name in enumerate(chosen)}
    neighbours: dict[str, tuple[str, ...]] = {}
    for head, group in groups.items():
        linked = {*chosen, *group}
        neighbours |= dict.fromkeys(group[1:], (head,))
        neighbours[head] = tuple(name for name in ids if name in linked and name != head)
    return Topology(spec, "peers", {name: neighbours[name] for name in ids}, groups)


def topology(spec: str, ids: Sequence[str], seed: int, aggregators: Sequence[str] = ()) -> Topology:
    """A topology by its name and parameters, over these nodes; `aggregators` of aggregators:k, by default the first k nodes.

    >>> topology("ring", ["a", "b", "c", "d"], 0).neighbours["a"]
    ('b', 'd')
    """
    name, *words = spec.split(":")
    if name in ("star", "rotating"):
        if words:
            raise Mistake(f"The topology '{name}' takes no parameters, but '{spec}' gives some.")
        return Topology(spec, name, dict.fromkeys(ids, ()))
    if len(ids) < 2:
        raise Mistake(f"The topology '{spec}' needs at least two nodes.")
    if name == "aggregators":
        return _in_groups(spec, words, ids, aggregators)
    if name == "edges":
        graph = _from_file(spec.partition(":")[2], ids)
    elif name in GRAPHS:
        try:
            graph = GRAPHS[name](len(ids), seed, *(float(w) if "." in w else int(w) for w in words))
        except (TypeError, ValueError, nx.NetworkXError):
            raise Mistake(f"The parameters of '{spec}' are out of range or too many: write {usage(name)}.") from None
    else:
        raise unknown("topology", name, TOPOLOGIES)
    return Topology(spec, "peers", {ids[k]: tuple(ids[j] for j in sorted(graph[k])) for k in range(len(ids))})
