"""What methods exhibit becomes small plain records; at a real site it becomes nothing."""

from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image

from kilter.core import Data, Node, Rows
from kilter.records.types import Exhibit
from kilter.runtimes.exhibits import BINS, EXTREMES, plain


def node(x: torch.Tensor, exhibits: bool = True) -> Node:
    rows = Rows.of(x=x, y=torch.arange(len(x)) % 3)
    return Node("c0", Data(rows, rows, rows), exhibits=exhibits)


def exhibit(at: Node, values: object) -> Exhibit:
    at.exhibit("weights", values)  # type: ignore[arg-type]
    note = plain(at, at.notes[-1])  # type: ignore[arg-type]
    assert isinstance(note, dict)
    shown = note["exhibit"]
    assert isinstance(shown, Exhibit)
    return shown


def test_a_real_site_exhibits_nothing() -> None:
    site = node(torch.rand(9, 1, 4, 4), exhibits=False)
    site.exhibit("weights", torch.rand(9))
    assert site.notes == []


def test_weights_of_rows_become_a_histogram_and_the_extreme_rows() -> None:
    weights = torch.arange(100) / 100
    shown = exhibit(node(torch.rand(100, 1, 5, 5)), weights)
    assert shown.histogram is not None
    assert sum(shown.histogram.counts) == 100
    assert len(shown.histogram.counts) == BINS
    assert shown.histogram.edges[0] == 0
    assert shown.histogram.edges[-1] == pytest.approx(0.99)
    assert [p.caption.split(",")[0] for p in shown.pictures] == [
        "0.99",
        "0.98",
        "0.97",
        "0.96",
        "0.03",
        "0.02",
        "0.01",
        "0.00",
    ]
    assert len(shown.pictures) == 2 * EXTREMES


def test_equal_weights_and_table_rows() -> None:
    shown = exhibit(node(torch.rand(7, 4)), torch.ones(7))
    assert shown.histogram is not None
    assert shown.histogram.counts == [7]
    assert len(shown.rows) == 7
    assert shown.rows[0] == "1.00, label 0"
    assert shown.pictures == []


def test_a_picture_keeps_its_pixels() -> None:
    x = torch.randint(0, 256, (1, 3, 6, 5), dtype=torch.uint8)
    (shown,) = exhibit(node(torch.rand(2, 1, 4, 4)), x).pictures
    image = torch.tensor(list(Image.open(io.BytesIO(base64.b64decode(shown.png))).tobytes())).reshape(6, 5, 3)
    assert torch.equal(image, x[0].permute(1, 2, 0).long())


def test_values_that_are_not_finite_are_left_out_and_strange_shapes_are_noticed() -> None:
    assert exhibit(node(torch.rand(2, 4)), {"a": 1.0, "b": float("nan")}).values == {"a": 1.0}
    odd = node(torch.rand(2, 4))
    odd.exhibit("weights", torch.rand(5))
    assert plain(odd, odd.notes[0]) == {"notice": "'weights' could not be exhibited"}  # type: ignore[arg-type]
