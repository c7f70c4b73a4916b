"""Curves in one line of text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kilter.records.types import Round, Spread
from kilter.report.sparkline import BLOCKS, WIDTH, curve_lines, sparkline


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_a_block_for_each_value_and_never_too_wide(values: list[float]) -> None:
    line = sparkline(values)
    assert len(line) == min(len(values), WIDTH)
    assert set(line) <= set(BLOCKS)


def test_the_curves_of_a_run() -> None:
    spread = Spread(0.5, 0, 0.5, 0.5, 0.5)
    rounds = [
        Round(round=t, loss=1 / (t + 1), global_metrics={"accuracy": t / 10}, client={"accuracy": spread})
        for t in range(1, 4)
    ]
    assert curve_lines(rounds) == [
        "global accuracy    ▁▅█  10.0 % to 30.0 %",
        "clients' accuracy  ▁▁▁  50.0 % to 50.0 %",
        "training loss      █▃▁  0.5 to 0.25",
    ]
    assert curve_lines(rounds[:1]) == []
