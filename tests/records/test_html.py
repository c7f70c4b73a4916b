"""Results in notebooks."""

from __future__ import annotations

from xml.etree import ElementTree

from kilter.records.html import curve_svg, result_html
from kilter.records.types import Evaluation, ModelScores, Notice, Round, Spread, Summary

SPREAD = Spread(0.5, 0.1, 0.4, 0.6, 0.4)


def rounds(n: int) -> list[Round]:
    return [Round(round=t, global_metrics={"accuracy": t / 10}, client={"accuracy": SPREAD}) for t in range(1, n + 1)]


def summary(name: str = "fedavg") -> Summary:
    last = Evaluation(3, "global", ModelScores({"accuracy": 0.3}), {"accuracy": SPREAD})
    notices = [Notice("a <b> notice", 2, [1, 2], ["c0"])]
    return Summary(method=name, rounds=3, seed=0, clients=4, topology="star", last=last, notices=notices)


def test_a_result_is_well_formed_and_complete() -> None:
    text = result_html(summary(), rounds(3))
    ElementTree.fromstring(text)
    assert "30.0 %" in text
    assert "50.0 % ± 10.0 %" in text
    assert "a &lt;b&gt; notice" in text


def test_names_cannot_add_elements() -> None:
    text = result_html(summary("<script>x</script>"), rounds(3))
    assert "<script>" not in text


def test_a_curve_needs_two_rounds() -> None:
    assert curve_svg(rounds(1), "accuracy") == ""
    svg = curve_svg(rounds(3), "accuracy")
    assert svg.count("<polyline") == 2
    assert 'points="0.0,' in svg
    assert curve_svg(rounds(3), "absent") == ""
