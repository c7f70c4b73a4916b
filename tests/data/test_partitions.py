"""Partition rules: known answers, then laws for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.data import PARTITIONS
from kilter.data import partitions as p
from kilter.data.partition_rules import RULES, parse, partition
from kilter.errors import Mistake

TEN = np.repeat(np.arange(10), 5000)  # CIFAR-10's labels


def table(labels, parts):
    return [np.bincount(labels[part], minlength=labels.max() + 1).tolist() for part in parts]


# ---- known answers ----


def test_dir_cap_known_answer():
    labels = np.repeat(np.arange(5), 40)
    parts = p.dirichlet(labels, 3, np.random.RandomState(0), 0.5)
    assert table(labels, parts) == [[20, 33, 0, 38, 0], [19, 0, 0, 0, 35], [1, 7, 40, 2, 5]]


def test_d9_noise_standard_deviations():
    ks = (0, 1, 50, 99)
    assert [p.noise_std(k, 0.3, 100) for k in ks] == pytest.approx([0, 0.054772, 0.387298, 0.544977], abs=5e-7)
    assert [p.noise_std(k, 0.3, 100, is_std=True) for k in ks] == pytest.approx([0, 0.003, 0.15, 0.297])


@pytest.mark.parametrize(
    ("dist", "size", "counts"),
    [
        (0, 11015, [5] * 3 + [1000] * 2 + [1500] * 2 + [2000] * 3),
        (1, 7535, [5] * 7 + [2500] * 3),
        (2, 14015, [5] * 3 + [2000] * 7),
    ],
)
def test_s7_sizes(dist, size, counts):
    parts = p.slfed(TEN, 4, np.random.default_rng(0), dist)
    assert [len(part) for part in parts] == [size] * 4
    assert all(sorted(row) == counts for row in table(TEN, parts))
    assert len({tuple(row) for row in table(TEN, parts)}) > 1  # random classes


def test_s7_dist3_groups():
    kinds = p.dist3_kinds(50)
    assert [kinds.count(kind) for kind in (0, 1, 2, 4, 5)] == [8, 7, 7, 8, 20]
    parts = p.slfed(TEN, 50, np.random.default_rng(0), 3)
    sizes = [len(part) for part in parts]
    assert sizes[:30] == [11015] * 8 + [7535] * 7 + [14015] * 7 + [20000] * 8
    wild = np.array(table(TEN, parts[30:]))
    assert wild.min() >= 1
    assert 3500 < wild.max() <= 4000
    assert abs(wild.mean() - 2000.5) < 250


@given(st.integers(1, 200))
def test_dist3_has_a_kind_for_every_client(clients):
    assert len(p.dist3_kinds(clients)) == clients


def test_slfed_scales_and_overlaps():
    parts = p.slfed(TEN, 50, np.random.default_rng(0), 3, 0.1)
    assert [len(parts[k]) for k in (0, 8, 15, 22)] == [1103, 757, 1403, 2000]  # 5 becomes 1 (0.5, and at least 1)
    assert sum(map(len, parts)) > len(set(np.concatenate(parts).tolist()))
    assert all(len(set(part.tolist())) == len(part) for part in parts)


def test_slfed_names_a_scale_that_works():
    labels = np.repeat(np.arange(10), 7)
    with pytest.raises(Mistake, match="use a scale of") as caught:
        p.slfed(labels, 3, np.random.default_rng(0), 1)
    scale = float(str(caught.value).split("use a scale of ")[1].split(" ")[0])
    assert len(p.slfed(labels, 3, np.random.default_rng(0), 1, scale)) == 3


def test_dirichlet_client_gives_equal_sizes_and_own_priors():
    parts = p.dirichlet_client(TEN, 20, np.random.default_rng(0), 0.1)
    assert {len(part) for part in parts} == {2500}
    peaks = [max(row) / 2500 for row in table(TEN, parts)]
    assert np.mean(peaks) > 0.5  # Dir(0.1) over ten classes is mostly on one
    even = p.dirichlet_client(TEN, 20, np.random.default_rng(0), 1000.0)
    assert max(max(row) / 2500 for row in table(TEN, even)) < 0.15


def test_dirichlet_client_survives_priors_on_exhausted_classes():
    labels = np.array([0] * 5 + [1] * 95)
    parts = p.dirichlet_client(labels, 10, np.random.default_rng(0), 0.001)
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))


@given(st.integers(2, 12), st.floats(0.7, 20), st.floats(0, 1), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_dirichlet_mixed_with_unequal_sizes_loses_no_row(clients, sizes, share, seed):
    few = TEN[::50]
    parts = p.dirichlet_mixed(few, clients, np.random.default_rng(seed), 0.5, share, 50.0, sizes)
    assert sorted(np.concatenate(parts)) == list(range(len(few)))
    assert min(map(len, parts)) >= 10


def test_dirichlet_mixed_draws_sizes_of_its_own():
    lengths = [
        sorted(map(len, p.dirichlet_mixed(TEN, 5, np.random.default_rng(3), 0.5, 0.4, 50.0, sizes)))
        for sizes in (0.0, 0.5, 1e5)
    ]
    assert lengths[0][-1] - lengths[0][0] <= 1
    assert lengths[1][-1] > 2 * lengths[1][0]
    assert lengths[2][-1] < 1.1 * lengths[2][0]


def test_dirichlet_mixed_has_mild_then_skewed_clients():
    parts = p.dirichlet_mixed(TEN, 10, np.random.default_rng(1), 0.5, 0.2)
    peaks = [max(row) / len(part) for row, part in zip(table(TEN, parts), parts, strict=True)]
    assert {len(part) for part in parts} == {5000}
    assert max(peaks[:8]) < min(peaks[8:])


def test_dirichlet_cluster_moves_a_group_of_classes_together():
    parts = p.dirichlet_cluster(TEN, 8, np.random.default_rng(0), 0.4, 2)
    rows = np.array(table(TEN, parts)).T / 5000  # share of each class at each client
    apart = np.abs(rows[:, None] - rows[None]).max(2) < 0.03
    assert sorted(apart.sum(1).tolist()) == [5] * 10


def test_shards_gives_few_classes():
    parts = p.shards(TEN, 10, np.random.default_rng(0), 2)
    assert {len(part) for part in parts} == {5000}
    assert all(1 <= sum(v > 0 for v in row) <= 2 for row in table(TEN, parts))


def test_quantity_skews_amount_not_labels():
    parts = p.quantity(TEN, 10, np.random.default_rng(0), 0.5)
    sizes = np.array([len(part) for part in parts])
    assert sizes.std() / sizes.mean() > 0.5
    biggest = parts[int(sizes.argmax())]
    assert np.bincount(TEN[biggest]).max() / len(biggest) < 0.12


def test_natural_takes_whole_groups_and_enough_rows():
    groups = np.array([0] * 5 + [1] * 50 + [2] * 30 + [3] * 60)
    parts = p.natural(groups, 2, np.random.default_rng(0), 31)
    assert [set(groups[part].tolist()) for part in parts] == [{1}, {3}]
    assert [len(part) for part in parts] == [50, 60]
    assert len(p.natural(groups, 0, np.random.default_rng(0))) == 4
    chosen = {tuple(int(groups[part[0]]) for part in p.natural(groups, 2, np.random.default_rng(s))) for s in range(20)}
    assert len(chosen) > 2
    with pytest.raises(Mistake, match="There are 2 natural clients with at least 31 rows, but 3 were requested"):
        p.natural(groups, 3, np.random.default_rng(0), 31)


def test_sources_seats_by_size():
    groups = np.array([0] * 10 + [1] * 60 + [2] * 30)
    parts = p.sources(groups, 10, np.random.default_rng(0))
    homes = [int(groups[part[0]]) for part in parts]
    assert [homes.count(g) for g in range(3)] == [1, 6, 3]
    assert all(len(set(groups[part].tolist())) == 1 for part in parts)
    assert len(p.sources(groups, 2, np.random.default_rng(0))) == 2


# ---- laws ----

SPECS = {
    "iid": "iid",
    "dirichlet": "dirichlet:0.3:1",
    "dirichlet-plain": "dirichlet-plain:0.5:0",
    "dirichlet-client": "dirichlet-client:0.05",
    "dirichlet-mixed": "dirichlet-mixed:0.1:0.5",
    "dirichlet-cluster": "dirichlet-cluster:0.4:0:0",
    "shards": "shards:2",
    "quantity": "quantity:0.3:1",
    "noise": "noise:0.3",
    "natural": "natural",
    "sources": "sources",
    "slfed": "slfed:0:0.0005",
    "fedsbme": "fedsbme:0.5:1",
}


def test_every_rule_is_under_the_laws():
    assert set(SPECS) == set(RULES) == set(PARTITIONS)


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=80).map(np.array),
    clients=st.integers(1, 12),
    seed=st.integers(0, 5),
    legacy=st.booleans(),
)
def test_laws_of_every_rule(name, labels, clients, seed, legacy):
    rule, arguments = parse(SPECS[name])
    rng = np.random.RandomState if legacy else np.random.default_rng
    try:
        parts = rule.divide(labels, clients, rng(seed), **arguments)
    except Mistake as mistake:
        groups = len(np.unique(labels))
        short = {"shards": 2 * clients > len(labels), "natural": clients > groups}.get(name, clients > len(labels))
        if short or "No draw in" in str(mistake):
            return
        raise  # whatever can be divided must be
    everything = np.concatenate(parts)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 for part in parts)
    assert all(len(set(part.tolist())) == len(part) for part in parts)
    if not rule.repeats:
        assert len(set(everything.tolist())) == len(everything)
    if not rule.repeats and (rule.by == "labels" or clients >= len(np.unique(labels))):
        assert sorted(everything.tolist()) == list(range(len(labels)))
    least = arguments.get("least", 1)
    assert min(map(len, parts)) >= least
    again = rule.divide(labels, clients, rng(seed), **arguments)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("natural", "sources")])
def test_another_seed_is_another_partition(name):
    rule, arguments = parse(SPECS[name])
    one, other = (rule.divide(TEN[::20], 5, np.random.default_rng(seed), **arguments) for seed in (0, 1))
    assert not all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("alpha", [1e-300, 1e-8, 1e8, 1e300])
@pytest.mark.parametrize("name", ["dirichlet-plain", "dirichlet-client", "dirichlet-cluster"])
@pytest.mark.parametrize("legacy", [False, True])
def test_extreme_alphas_terminate(name, alpha, legacy):
    rng = (np.random.RandomState if legacy else np.random.default_rng)(0)
    rule, arguments = parse(f"{name}:{alpha}" + ("" if name == "dirichlet-client" else ":least=0"))
    parts = rule.divide(TEN[::50], 7, rng, **arguments)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))


# ---- mistakes ----


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichlett:0.1", "did you mean 'dirichlet'"),
        ("dirichlet:x", r"alpha must be of type float, not 'x': write dirichlet\[:alpha=0.5\]\[:least=10\]"),
        ("dirichlet:0.1:2.5", "least must be of type int"),
        ("iid:3", "argument too many, '3': write iid"),
        ("noise:0.3:perhaps", "is_std must be of type bool"),
        ("noise:loudness=3", "argument too many"),
    ],
)
def test_wrong_specs(spec, message):
    with pytest.raises(Mistake, match=message):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("iid", 101, "ask for at most 100 clients"),
        ("iid", 0, "at least 1 client"),
        ("natural", -1, "at least 1 client"),
        ("dirichlet:0.5", 11, "need 110 rows, but there are 100"),
        ("quantity:0.0001", 9, "No draw in 500"),
        ("dirichlet:-1", 2, "alpha must be a number above 0"),
        ("dirichlet:nan", 2, "alpha must be a number above 0"),
        ("dirichlet-mixed:0.5:1.2", 2, "share must be between 0 and 1"),
        ("dirichlet-mixed:0.5:0.5:50:-1", 2, "sizes must be a finite number of at least 0"),
        ("dirichlet-cluster:0.5:11", 2, "clusters must be between 0 and 10"),
        ("shards:0", 2, "shards must be between 1 and 100"),
        ("noise:-0.1", 2, "level must be a finite number of at least 0"),
        ("slfed:4", 2, "dist must be 0, 1, 2 or 3"),
        ("slfed:0:0", 2, "scale must be a number above 0"),
    ],
)
def test_impossible_splits(spec, clients, message):
    rule, arguments = parse(spec)
    with pytest.raises(Mistake, match=message):
        rule.divide(np.repeat(np.arange(10), 10), clients, np.random.default_rng(0), **arguments)


def test_named_arguments_and_defaults():
    assert parse("noise:is_std=true")[1] == {"level": 0.3, "is_std": True}
    assert parse("dirichlet:0.1")[1] == {"alpha": 0.1, "least": 10}


def test_adding_a_partition_is_adding_one_function():
    @partition("halves")
    def halves(labels, clients, rng, first: int = 1):
        """First come."""
        return np.array_split(np.arange(len(labels)), clients)

    try:
        rule, arguments = parse("halves:2")
        assert (rule.by, arguments, rule.signature) == ("labels", {"first": 2}, "halves[:first=1]")
    finally:
        del RULES["halves"]
