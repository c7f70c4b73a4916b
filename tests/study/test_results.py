"""What a study reads from its runs."""

from __future__ import annotations

import pytest

from kilter.records.types import ClientReport, Partition
from kilter.study.results import skewed_accuracy

EVEN, ONE, TWO = [10, 10, 10, 10], [40, 0, 0, 0], [0, 20, 20, 0]


def reports(*local: float | None) -> dict[str, ClientReport]:
    return {f"c{k}": ClientReport(1, 0, local=value) for k, value in enumerate(local)}


def test_the_skewed_clients_are_a_group() -> None:
    partition = Partition({"c0": EVEN, "c1": ONE, "c2": TWO, "c3": EVEN})
    assert skewed_accuracy(partition, reports(0.9, 0.2, 0.4, 0.9)) == pytest.approx(0.3)
    assert skewed_accuracy(partition, reports(0.9, 0.2, None, 0.9)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "clients",
    [{"c0": EVEN, "c1": EVEN}, {"c0": ONE, "c1": [0, 40, 0, 0]}, {"c0": ONE, "c1": ONE}, {}],
    ids=["none is skewed", "all are skewed", "one class only", "no clients"],
)
def test_there_is_no_group_where_all_clients_are_alike(clients: dict[str, list[int]]) -> None:
    assert skewed_accuracy(Partition(clients), reports(0.5, 0.6)) is None
    assert skewed_accuracy(None, reports(0.5)) is None
