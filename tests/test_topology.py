"""Who may write to whom: every graph is what its name says, connected, both ways, and the same from the same seed."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.errors import Mistake
from kilter.topology import TOPOLOGIES, topology

IDS = [f"n{k}" for k in range(10)]
SPECS = [
    "full",
    "ring",
    "regular",
    "regular:3",
    "random",
    "random:0.5",
    "small-world",
    "small-world:4:0.3",
    "small-world:2",
]


def graph(spec: str, ids: list[str] = IDS, seed: int = 0) -> nx.Graph:
    actual = topology(spec, ids, seed)
    assert actual.kind == "peers"
    assert list(actual.neighbours) == ids
    made = nx.DiGraph((a, b) for a, peers in actual.neighbours.items() for b in peers)
    assert made.reverse().edges == made.edges  # whoever may write may be answered
    assert not list(nx.selfloop_edges(made))
    assert set(made) == set(ids)
    return made.to_undirected()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_connected_both_ways_and_reproducible(spec: str, seed: int) -> None:
    made = graph(spec, seed=seed)
    assert nx.is_connected(made)
    assert topology(spec, IDS, seed) == topology(spec, IDS, seed)
    assert topology(spec, IDS, seed).spec == spec


@given(st.integers(2, 15))
def test_degrees(n: int) -> None:
    ids = [str(k) for k in range(n)]
    assert set(dict(graph("full", ids).degree).values()) == {n - 1}
    assert set(dict(graph("ring", ids).degree).values()) == {min(2, n - 1)}
    if n > 4:
        assert set(dict(graph("regular:4", ids).degree).values()) == {4}
        assert graph("small-world:4:0.5", ids).number_of_edges() == 2 * n


def test_neighbours_come_in_the_order_of_the_ids() -> None:
    for spec in SPECS:
        for peers in topology(spec, IDS, 1).neighbours.values():
            assert list(peers) == sorted(peers, key=IDS.index)


@pytest.mark.parametrize("spec", ["regular:3", "random:0.4", "small-world:4:0.5"])
def test_another_seed_is_another_graph(spec: str) -> None:
    assert len({str(topology(spec, IDS, seed).neighbours) for seed in range(5)}) > 1


def test_denser_is_denser() -> None:
    edges = [sum(graph(f"random:{p}", seed=s).number_of_edges() for s in range(10)) for p in (0.3, 0.6, 0.9)]
    assert edges[0] < edges[1] < edges[2]
    assert 0.5 * 45 < edges[1] / 10 < 0.7 * 45


def test_a_turn_for_everyone() -> None:
    actual = topology("rotating", IDS[:3], 0)
    assert (actual.kind, topology("star", IDS, 0).kind) == ("rotating", "star")
    assert [actual.aggregator(r, IDS[:3]) for r in (0, 1, 2, 3, 4)] == ["n0", "n0", "n1", "n2", "n0"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("strar", "did you mean 'star'"),
        ("", "Unknown topology ''"),
        ("star:3", "takes no parameters"),
        ("rotating:1", "takes no parameters"),
        ("ring:3", "out of range or too many: write "),
        ("full:2", "out of range or too many: write "),
        ("regular:x", "out of range or too many: write "),
        ("regular:", "out of range or too many: write "),
        ("regular:10", "degree must be below 10"),
        ("regular:0", "degree must be below 10"),
        ("regular:2:2", "out of range or too many: write "),
        ("random:0.0", "No connected graph"),
        ("random:nan", "out of range or too many: write "),
        ("small-world:1", "1 < degree"),
        ("small-world:10", "1 < degree"),
        ("small-world:4:0.1:9", "out of range or too many: write "),
        ("edges", "cannot be read"),
        ("edges:/nowhere/at/all", "cannot be read"),
    ],
)
def test_bad_specs_in_one_sentence(spec: str, says: str) -> None:
    with pytest.raises(Mistake, match=says) as actual:
        topology(spec, IDS, 0)
    assert "\n" not in str(actual.value)


@pytest.mark.parametrize(
    "spec", ["regular:2.5", "regular:3.0", "random:1.5", "random:-0.5", "small-world:4:1.5", "small-world:3.5"]
)
def test_numbers_of_the_wrong_kind_are_refused(spec: str) -> None:
    with pytest.raises(Mistake):
        topology(spec, IDS, 0)


def test_odd_regular_graphs_do_not_exist() -> None:
    with pytest.raises(Mistake, match="product even"):
        topology("regular:3", IDS[:5], 0)


def test_peers_need_each_other() -> None:
    for spec in TOPOLOGIES:
        if spec in ("star", "rotating"):
            assert topology(spec, ["a"], 0).neighbours == {"a": ()}
        else:
            with pytest.raises(Mistake, match="at least two nodes"):
                topology(spec, ["a"], 0)


# Edge lists ----------------------------------------------------------------------------------------------------------


def edges(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "edges.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return f"edges:{path}"


def test_edges_by_name_or_position(tmp_path: Path) -> None:
    spec = edges(tmp_path, "# a path\n\na b\n1,2  # b to c\n  c , d\na b\n")
    assert topology(spec, ["a", "b", "c", "d"], 0).neighbours == {
        "a": ("b",),
        "b": ("a", "c"),
        "c": ("b", "d"),
        "d": ("c",),
    }


def test_a_name_that_is_a_number_is_a_name_first(tmp_path: Path) -> None:
    actual = topology(edges(tmp_path, "1 2\n2 0\n"), ["2", "0", "1"], 0).neighbours
    assert actual == {"2": ("0", "1"), "0": ("2",), "1": ("2",)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a b\na\n", "Line 2 .* 'a'"),
        ("a b c\n", "Line 1"),
        ("a a\n", "Line 1"),
        ("a b\n\nb x\n", "Line 3 .* 'b x'"),
        ("0 4\n", "Line 1"),
        ("0 -1\n", "Line 1"),
        ("a b\nc d\n", "not connected"),
        ("", "not connected"),
        (b"\xff\xfe\x00", "not a text file"),
        ("a ²\n", "Line 1"),
    ],
)
def test_bad_edge_lists(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(Mistake, match=says):
        topology(edges(tmp_path, text), ["a", "b", "c", "d"], 0)


def test_a_folder_is_no_edge_list(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="cannot be read"):
        topology(f"edges:{tmp_path}", IDS, 0)
