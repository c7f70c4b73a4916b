"""What a model card says about each client's targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kilter import Data, Rows
from kilter.experiment import Experiment
from kilter.records.model_card import data_lines
from kilter.records.run_folder import Store, read_partition
from kilter.records.types import Partition
from kilter.runtimes.target_statistics import target_statistics


def client(y: torch.Tensor) -> Data:
    rows = Rows.of(x=torch.zeros(len(y), 1), y=y)
    return Data(train=rows, valid=rows, test=rows)


def test_numbers_times_and_labels() -> None:
    numbers = target_statistics("regression", (), {"a": client(torch.tensor([1.0, 3.0]))})
    assert numbers == {"a": {"rows": 2, "mean": 2.0, "deviation": 1.0, "smallest": 1.0, "largest": 3.0}}
    times = target_statistics("survival", (), {"a": client(torch.tensor([[1.0, 1.0], [2.0, 0.0], [9.0, 1.0]]))})
    assert times == {"a": {"rows": 3, "median time": 2.0, "events": 2.0}}
    labels = target_statistics("multi-label", ("flu", "cold"), {"a": client(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))})
    assert labels == {"a": {"rows": 2, "flu": 2.0, "cold": 1.0}}
    masks = target_statistics("segmentation", (), {"a": client(torch.zeros(4, 2, 2, dtype=torch.int64))})
    assert masks == {"a": {"rows": 4}}
    assert target_statistics("regression", (), {"a": client(torch.zeros(0))}) == {"a": {"rows": 0}}


def test_a_card_names_classes_that_occur() -> None:
    lines = data_lines(Partition({"a": [3, 1]}, ["cat", "dog", "fox"]))
    assert lines == ["| client | cat | dog |", "|---|---|---|", "| a | 3 | 1 |"]
    assert data_lines(Partition({}, targets={"a": {"rows": 2, "mean": 2.0}}))[2] == "| a | 2 | 2 |"


@pytest.mark.parametrize(("data", "heading"), [("diabetes", "| client | rows | mean |"), ("wine", "| client | class")])
def test_the_card_of_a_simulation_describes_the_data_of_each_client(tmp_path: Path, data: str, heading: str) -> None:
    experiment = Experiment.of({"data": data, "clients": 3, "rounds": 1, "partition": "iid"})
    method, fed = experiment.build(workers=1)
    with fed:
        experiment.run(method, fed, Store(tmp_path))
    assert heading in (tmp_path / "README.md").read_text()
    assert read_partition(tmp_path) is not None
