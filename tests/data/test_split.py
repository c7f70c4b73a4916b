"""Splits: no row where it must not be, for every rule; noise; names; public rows."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.core import Rows
from kilter.data import Dataset, load, split
from kilter.errors import Mistake

SPECS = [
    "iid",
    "dirichlet:0.5:1",
    "dirichlet-plain:0.8",
    "dirichlet-client:0.3",
    "dirichlet-mixed",
    "dirichlet-cluster:0.8",
    "shards:2",
    "quantity:1:2",
    "noise:0.3",
    "natural",
    "sources",
    "slfed:3:0.002",
    "fedsbme:0.5:2",
]


def made(rows=300, classes=5, groups=6, seed=0, shape=(1, 4, 4)) -> Dataset:
    """Random images with labels and groups."""
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(rows))
    return Dataset(
        name="made",
        x=torch.from_numpy(rng.uniform(size=(rows, *shape)).astype(np.float32)),
        y=torch.from_numpy(rng.permutation(np.arange(rows) % classes)),
        train=order[rows // 5 :],
        test=order[: rows // 5],
        classes=tuple("abcdefghij"[:classes]),
        groups=torch.from_numpy(rng.permutation(np.arange(rows) % groups)),
        group_names=tuple(f"site {g}" for g in range(groups)),
    )


def everything(whole):
    rows = [r for d in whole.clients.values() for r in (d.train, d.valid, d.test)]
    return rows + [r for r in (whole.test, whole.public, whole.public_test) if r is not None]


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99), clients=st.integers(1, 6), rows=st.sampled_from([60, 300]), public=st.sampled_from([0, 2])
)
def test_laws_of_every_split(spec, seed, clients, rows, public):
    data = made(rows, seed=seed)
    public = 0 if spec.startswith("fedsbme") else public
    try:
        whole = split(data, spec, clients, seed, public_per_class=public)
    except Mistake:
        if rows == 60:  # 48 training rows may be too few for a rule's counts; 240 are not
            return
        raise
    test = set(data.test.tolist())
    learnt = [set(d.train.index.tolist()) | set(d.valid.index.tolist()) for d in whole.clients.values()]
    local = set().union(*(d.test.index.tolist() for d in whole.clients.values()))
    trained = set().union(*(d.train.index.tolist() for d in whole.clients.values()))
    for some in learnt:
        assert not some & (test | local)
    assert not trained & set().union(*(d.valid.index.tolist() for d in whole.clients.values()))
    if whole.public is not None:
        assert not set(whole.public.index.tolist()) & (test | local | set().union(*learnt))
        assert np.bincount(data.y[whole.public.index]).min() >= (public or 1)
    assert len(whole.clients) == clients
    assert all(len(d.train) >= 1 for d in whole.clients.values())
    if not whole.repeats:
        assert sum(map(len, learnt)) == len(set().union(*learnt))
    assert whole.test.index.tolist() == data.test.tolist()
    tables = whole.test.tables
    assert all(some.tables["x"] is tables["x"] and some.tables["y"] is tables["y"] for some in everything(whole))
    again = split(data, spec, clients, seed, public_per_class=public)
    assert all(torch.equal(a.index, b.index) for a, b in zip(everything(whole), everything(again), strict=True))
    assert torch.equal(tables["x"], again.test.tables["x"])


@pytest.mark.parametrize("spec", [s for s in SPECS if s not in ("natural", "slfed:3:0.002")])
def test_all_training_rows_are_used(spec):
    data = made()
    whole = split(data, spec, 6)
    rows = [some.index for some in everything(whole) if some is not whole.test]
    used = set(torch.cat(rows).tolist()) - set(data.test.tolist())
    assert used == set(data.train.tolist())


def test_shares_of_a_client():
    data = made(1000 * 10 // 8)  # 1000 training rows
    whole = split(data, "iid", 10)
    assert {(len(d.train), len(d.valid), len(d.test)) for d in whole.clients.values()} == {(77, 8, 15)}
    bare = split(data, "iid", 10, valid=0, test=0)
    assert {(len(d.train), len(d.valid), len(d.test)) for d in bare.clients.values()} == {(100, 0, 0)}


def test_feddisk_sizes():
    data = made(75_000, shape=(1,))  # 60 000 training rows
    whole = split(data, "noise:0.3", 100)
    assert {(len(d.train) + len(d.valid), len(d.test)) for d in whole.clients.values()} == {(510, 90)}
    assert list(whole.clients)[::33] == ["c00", "c33", "c66", "c99"]


@pytest.mark.parametrize(("rows", "sizes"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1)), (4, (2, 1, 1))])
def test_tiny_clients_keep_a_training_row(rows, sizes):
    data = made(100)
    data = replace(data, train=data.train[: 5 * rows])
    for d in split(data, "iid", 5).clients.values():
        assert (len(d.train), len(d.valid), len(d.test)) == sizes


def test_noise_is_once_per_row_clipped_and_leaves_tests_clean():
    data = made(1000)
    whole = split(data, "noise:0.3", 5)
    x = whole.test.tables["x"]
    assert x is not data.x
    assert torch.equal(x[data.test], data.x[data.test])
    assert x.min() == 0
    assert x.max() == 1
    spread = [(x[d.train.index] - data.x[d.train.index]).std().item() for d in whole.clients.values()]
    assert spread[0] == 0
    assert spread == sorted(spread)
    held = (x[whole.clients["c04"].test.index] - data.x[whole.clients["c04"].test.index]).std().item()
    assert held == pytest.approx(spread[4], rel=0.1)  # test rows get the client's level too
    middle = split(replace(data, x=torch.full_like(data.x, 0.5)), "noise:0.02", 2)
    rows = middle.clients["c01"].train
    assert (rows["x"] - 0.5).std().item() == pytest.approx(0.1, rel=0.05)  # sqrt(1 x 0.02 / 2), hardly clipped


def test_noise_on_bytes_and_on_tables():
    data = made(200)
    images = replace(data, x=torch.full_like(data.x, 128).to(torch.uint8))
    noisy = split(images, "noise:0.02", 2)
    assert noisy.dataset.x.dtype == torch.uint8
    assert noisy.clients["c01"].train["x"].std().item() == pytest.approx(0.1, rel=0.1)
    flat = split(replace(data, x=data.x.flatten(1) * 10), "noise:0.3", 2)
    assert flat.dataset.x.max() > 5  # a table is not clipped to 0..1


def test_natural_clients_bear_names_and_bring_their_tests():
    data = replace(made(), group_names=("St. Mary's", "B", "C", "D", "St. Mary s", "F"))
    whole = split(data, "natural", 0)
    assert list(whole.clients) == ["St.-Mary-s-0", "B", "C", "D", "St.-Mary-s-4", "F"]
    tests = [set(d.test.index.tolist()) for d in whole.clients.values()]
    assert set().union(*tests) == set(data.test.tolist())
    assert sum(map(len, tests)) == len(data.test)
    for g, d in enumerate(whole.clients.values()):
        assert set(data.groups[d.test.index].tolist()) | set(data.groups[d.train.index].tolist()) == {g}


def test_natural_without_test_rows_carves_its_own():
    data = made()
    data = replace(data, test=data.test[data.groups[data.test] != 2])
    own = split(data, "natural", 0).clients["site-2"].test
    assert len(own) > 0
    assert set(own.index.tolist()) <= set(data.train.tolist())


def test_sources_share_the_tests_of_their_group():
    data = made()
    whole = split(data, "sources", 30)
    tests = torch.cat([d.test.index for d in whole.clients.values()]).tolist()
    assert sorted(tests) == sorted(data.test.tolist())
    crowded = split(replace(data, test=data.test[:12]), "sources", 30)
    for name, d in crowded.clients.items():  # twelve test rows for thirty clients: those of a group share them
        group = int(data.groups[d.train.index[0]])
        theirs = [t for t in data.test[:12].tolist() if data.groups[t] == group]
        assert sorted(d.test.index.tolist()) == sorted(theirs) or not theirs or len(theirs) >= 5, name


def test_slfed_tests_follow_the_clients_labels():
    data = made(5000, classes=10)
    whole = split(data, "slfed:1:0.1", 5)
    for d in whole.clients.values():
        learnt = np.bincount(torch.cat([d.train["y"], d.valid["y"]]), minlength=10)
        tested = np.bincount(d.test["y"], minlength=10)
        assert learnt.sum() == 3 * 250 + 7
        assert set(d.test.index.tolist()) <= set(data.test.tolist())
        assert (tested[learnt > 200] > 30).all()
        assert tested[learnt <= 1].sum() == 0
    rows = torch.cat([d.train.index for d in whole.clients.values()]).tolist()
    assert len(set(rows)) < len(rows)


def test_fedsbme_shares():
    whole = split(made(1250), "fedsbme", 4)
    assert len(whole.public) == 200
    assert len(whole.public_test) == 100
    tests = sum(len(d.test) for d in whole.clients.values())
    trains = sum(len(d.train) + len(d.valid) for d in whole.clients.values())
    assert (trains, tests) == (pytest.approx(400, abs=3), pytest.approx(300, abs=3))
    with pytest.raises(Mistake, match="The partition 'fedsbme' sets public rows aside itself"):
        split(made(1250), "fedsbme", 4, public_per_class=1)


def test_public_rows_are_even_over_classes():
    whole = split(made(), "iid", 3, public_per_class=7)
    assert np.bincount(whole.public["y"]).tolist() == [7] * 5
    with pytest.raises(Mistake, match=r"would be all .* training rows of class"):
        split(made(), "iid", 3, public_per_class=1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partition": "natural"}, "needs natural groups, but 'digits' has none"),
        ({"valid": 1.0}, "valid share must be at least 0 and below 1"),
        ({"test": -0.1}, "test share must be"),
        ({"public_per_class": -1}, "must be at least 0, not -1"),
        ({"partition": "dirichlet-plain:0.01:0", "clients": 100}, "without rows: raise `least`"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(Mistake, match=message):
        split(load("digits"), **arguments)


def test_seeds_differ():
    data = made()
    one, other = (split(data, "iid", 3, seed).clients["c00"].train.index for seed in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("leak", ["train in test", "valid in train", "public in test", "twice", "none"])
def test_check_finds_leaks(leak):
    whole = split(made(), "iid", 3, public_per_class=1)
    first, second = (whole.clients[k] for k in ("c00", "c01"))

    def plus(rows, other):
        return Rows(rows.tables, torch.cat([rows.index, other.index[:1]]))

    clients, public = dict(whole.clients), whole.public
    if leak == "train in test":
        clients["c00"] = replace(first, train=plus(first.train, second.test))
    if leak == "valid in train":
        clients["c00"] = replace(first, valid=plus(first.valid, second.train))
    if leak == "public in test":
        public = plus(public, whole.test)
    if leak == "twice":
        clients["c00"] = replace(first, train=plus(first.train, second.train))
    if leak == "none":
        clients["c00"] = replace(first, train=first.train.take(torch.arange(0)))
    whole.check()
    with pytest.raises(ValueError, match=r"rows are both|two clients hold|no training rows"):
        replace(whole, clients=clients, public=public).check()


def test_splitting_is_quick():
    data = made(75_000, shape=(1,))
    start = time.perf_counter()
    split(data, "dirichlet:0.5", 100)
    assert time.perf_counter() - start < 5
