"""Measures of skew against hand-computed cases, and their pictures."""

from __future__ import annotations

from io import StringIO
from math import log, sqrt

import numpy as np
import pytest
import torch
from rich.console import Console

from kilter.core import Data, Rows
from kilter.data import Dataset, Split, load, split
from kilter.data.skew import counts, entropy, feature_skew, gini, js, kl, measure, variation
from kilter.errors import Mistake
from kilter.report.skew_picture import draw, table


def by_hand(clients, y, x=None):
    """A split with these training rows."""
    y = torch.tensor(y)
    x = torch.zeros(len(y), 1) if x is None else x
    tables = {"x": x, "y": y}
    none = torch.zeros(0, dtype=torch.int64)
    data = Dataset("hand", x, y, torch.arange(len(y)), none, tuple(str(c) for c in range(int(y.max()) + 1)))
    nodes = {
        name: Data(*(Rows(tables, torch.tensor(r, dtype=torch.int64)) for r in (rows[:-1], rows[-1:], [])))
        for name, rows in clients.items()
    }
    return Split(data, nodes, Rows(tables, none), None)


def test_divergences():
    assert entropy([0.25] * 4) == pytest.approx(log(4))
    assert entropy([1, 0]) == 0
    assert kl([0.5, 0.5], [0.25, 0.75]) == pytest.approx(0.5 * log(2) + 0.5 * log(2 / 3))
    assert kl([0.5, 0.5], [1, 0]) == float("inf")
    assert kl([0.3, 0.7], [0.3, 0.7]) == 0
    assert js([1, 0], [0, 1]) == pytest.approx(log(2))
    assert js([1, 0], [0.5, 0.5]) == pytest.approx((log(4 / 3) + 0.5 * log(2 / 3) + 0.5 * log(2)) / 2)


def test_amounts():
    assert gini([5, 5, 5]) == 0
    assert gini([0, 0, 12]) == pytest.approx(2 / 3)
    assert gini([1, 3]) == pytest.approx(0.25)  # |1 - 3| x 2 / (2 x 2 x 4)
    assert variation([1, 3]) == pytest.approx(0.5)


def test_a_whole_split_by_hand():
    # a: 4 rows of class 0; b: 2 rows of class 0, 6 of class 1. Pooled: one half each.
    whole = by_hand({"a": [0, 1, 2, 3], "b": list(range(4, 12))}, [0] * 6 + [1] * 6)
    assert counts(whole).tolist() == [[4, 0], [2, 6]]
    skew = measure(whole)
    a, b = skew.clients
    b_kl = 0.25 * log(0.5) + 0.75 * log(1.5)
    assert (a.id, a.n, a.classes, a.entropy) == ("a", 4, 1, 0)
    assert (b.id, b.n, b.classes) == ("b", 8, 2)
    assert a.kl == pytest.approx(log(2))
    assert b.kl == pytest.approx(b_kl)
    assert skew.kl == pytest.approx((log(2) + b_kl) / 2)
    assert skew.kl_weighted == pytest.approx((4 * log(2) + 8 * b_kl) / 12)
    assert skew.js_weighted == pytest.approx((4 * a.js + 8 * b.js) / 12)
    assert (skew.classes, skew.smallest, skew.largest) == (1.5, 4, 8)
    assert skew.gini == pytest.approx(4 / 24)
    assert skew.variation == pytest.approx(1 / 3)
    assert skew.feature is None  # constant features tell nothing


def test_feature_skew_by_hand():
    # One class, two clients of 4: values 0,0,2,2 and 4,4,6,6. Means 1 and 5, pooled 3; squares 4 each.
    # Pooled variance: sum of squares 2(9 + 1 + 1 + 9) = 40, over 7. Chance: 1/4 - 1/8.
    x = torch.tensor([0.0, 0, 2, 2, 4, 4, 6, 6])[:, None]
    y = torch.zeros(8, dtype=torch.int64)
    rows = [torch.arange(4), torch.arange(4, 8)]
    assert feature_skew(x, y, rows) == pytest.approx(sqrt(4 / (40 / 7) - 1 / 8), rel=1e-6)
    constant = torch.cat([x, torch.ones(8, 1)], dim=1)
    assert feature_skew(constant, y, rows) == pytest.approx(sqrt(4 / (40 / 7) - 1 / 8), rel=1e-6)
    assert feature_skew(x, torch.tensor([0] * 4 + [1] * 4), rows) is None  # each class at one client: label skew alone


def test_feature_skew_tells_noise_from_labels():
    digits = load("digits")
    plain, labels, noisy = (measure(split(digits, p, 10)) for p in ("iid", "dirichlet-client:0.3", "noise:0.3"))
    assert plain.feature < 0.12
    assert labels.feature < 0.12
    assert noisy.feature > 0.15
    assert plain.kl < 0.06
    assert noisy.kl < 0.06
    assert labels.kl > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_bytes_and_floats_agree(dtype):
    x = torch.randint(0, 256, (60, 1, 3, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    x[:30] //= 2
    rows = [torch.arange(30), torch.arange(30, 60)]
    table_ = x if dtype == torch.uint8 else x.float() / 255
    reference = feature_skew(x.double().flatten(1).float(), torch.zeros(60, dtype=torch.int64), rows)
    assert feature_skew(table_, torch.zeros(60, dtype=torch.int64), rows) == pytest.approx(reference, rel=1e-4)


# ---- pictures ----


def text(whole):
    console = Console(file=StringIO(), width=200)
    console.print(table(whole))
    return console.file.getvalue()


def test_terminal_table_shows_counts_and_measures():
    whole = split(load("digits"), "dirichlet:0.5", 5)
    shown = text(whole)
    for name, row in zip(whole.clients, counts(whole), strict=True):
        line = next(line for line in shown.splitlines() if line.startswith(name))
        assert line.split()[1:11] == [str(v) if v else "·" for v in row]
    assert "digits, dirichlet:0.5, 5 clients" in shown
    assert f"{measure(whole).gini:.3f}" in shown


def test_terminal_table_of_many_classes_is_shaded():
    y = np.arange(600) % 60
    shown = text(by_hand({"a": list(range(300)), "b": list(range(300, 540))}, y.tolist()))
    assert "60 classes, 0 to 59" in shown
    assert "█" * 30 in shown  # two classes a cell, so that it fits eighty columns
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize(("clients", "classes"), [(5, 2), (100, 62)])
def test_drawing(tmp_path, suffix, clients, classes):
    y = (np.arange(clients * classes * 2) % classes).tolist()
    parts = np.array_split(np.arange(len(y)), clients)
    path = tmp_path / "deep" / f"skew{suffix}"
    draw(by_hand({f"c{k:02d}": part.tolist() for k, part in enumerate(parts)}, y), path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in start or b"<?xml" in start
    assert path.stat().st_size > 5000


def test_drawing_knows_two_kinds(tmp_path):
    with pytest.raises(Mistake, match=r"neither \.png nor \.svg"):
        draw(split(load("digits"), "iid", 2), tmp_path / "a.pdf")
