"""What statistics of sites show about their data, and what they do not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kilter.data.columns import Parsed
from kilter.data.federated_inspection import FederatedInspection, inspect_sites, with_label_counts
from kilter.data.schema import Column, Schema
from kilter.data.skew import of_counts
from kilter.data.statistics import summarise
from kilter.report import federated_inspection as shown

SCHEMA = with_label_counts(Schema((Column("age", "number"), Column("ward", "category")), "y", ("ill", "well")))


def inspected(**sites: tuple[list[float], list[str], list[str]]) -> FederatedInspection:
    parts = {}
    for name, (ages, wards, labels) in sites.items():
        raw = {"age": Parsed("number", np.array(ages)), "ward": Parsed.of_words(wards), "y": Parsed.of_words(labels)}
        statistics = summarise(raw, SCHEMA, np.arange(len(ages)), 5)
        parts[name] = {"columns": {column: known.plain() for column, known in statistics.items()}}
    return inspect_sites(SCHEMA, parts)


def test_labels_gaps_means_and_skew_are_those_of_the_rows():
    a = [*range(30)]
    b = [*range(100, 128), np.nan, np.nan]
    report = inspected(a=(a, ["X"] * 30, ["ill"] * 20 + ["well"] * 10), b=(b, ["X"] * 15 + ["Y"] * 15, ["well"] * 30))
    assert [(s.name, s.rows, s.labels) for s in report.sites] == [
        ("a", 30, {"ill": 20, "well": 10}),
        ("b", 30, {"well": 30}),
    ]
    expected = of_counts(["a", "b"], np.array([[20, 10], [0, 30]]))
    assert [s.kl for s in report.sites] == [client.kl for client in expected.clients]
    age_b = next(c for c in report.columns if (c.site, c.column) == ("b", "age"))
    known = np.array([*a, *range(100, 128)])
    assert (age_b.mean, age_b.gaps) == (pytest.approx(113.5), pytest.approx(2 / 30))
    assert age_b.distance == pytest.approx(abs(113.5 - known.mean()) / known.std())
    assert [c.values for c in report.columns if c.column == "ward"] == [1, 2]
    assert "b has enough rows of one class only." in report.warnings


def test_values_of_few_rows_are_not_shown():
    ages = [50.0] * 20 + [np.nan] * 10
    report = inspected(
        a=(ages, ["rare"] * 3 + ["X"] * 27, ["ill"] * 2 + ["well"] * 28), b=([np.nan] * 30, [""] * 30, ["ill"] * 30)
    )
    text = json.dumps(report.plain())
    assert "rare" not in text
    assert report.sites[0].labels == {"well": 28}
    assert "`age` has no values at b, or too few to share." in report.warnings


def test_a_mean_in_another_unit_is_named_in_the_page_and_the_terminal():
    report = inspected(
        metres=([1.7] * 40, ["X"] * 40, ["ill", "well"] * 20),
        centimetres=([170.0] * 10, ["X"] * 10, ["ill", "well"] * 5),
    )
    (warning,) = [text for text in report.warnings if "same unit" in text]
    assert "`age` at centimetres" in warning
    assert "centimetres" in shown.page(report)
    assert len(shown.tables(report)) > 4


def test_another_unit_at_one_of_two_equal_sites_is_named():
    heights, ward, ill = np.linspace(150, 190, 40), ["X"] * 40, ["ill", "well"] * 20
    report = inspected(a=(list(heights), ward, ill), b=(list(heights / 100), ward, ill))
    assert [text for text in report.warnings if "same unit" in text] == [
        "The mean of `age` is 170 at a and 1.7 at the other sites: is it in the same unit?",
        "The mean of `age` is 1.7 at b and 170 at the other sites: is it in the same unit?",
    ]
    usual = inspected(a=(list(heights), ward, ill), b=(list(heights + 20), ward, ill))
    assert not [text for text in usual.warnings if "same unit" in text]


def test_targets_that_are_no_classes_are_left_out():
    schema = Schema((Column("age", "number"),), "days", ("days",), "regression", (Column("days", "number"),))
    assert with_label_counts(schema) == schema
    raw = {name: Parsed("number", np.arange(30.0)) for name in ("age", "days")}
    plain = {"columns": {name: c.plain() for name, c in summarise(raw, schema, np.arange(30), 5).items()}}
    (site,) = inspect_sites(schema, {"a": plain}).sites
    assert (site.rows, site.labels, site.kl) == (30, {}, None)
