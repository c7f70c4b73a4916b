"""Study files: what they ask for, and every way to get one wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kilter.commands.study import one_method, several, value
from kilter.errors import Mistake
from kilter.study.grid import Study
from kilter.study.tuning import budget, trials

BASE: dict[str, Any] = {
    "methods": ["fedavg", {"method": "fedprox", "mu": 0.1}],
    "seeds": 2,
    "grid": {"partition": ["iid", "dirichlet:0.1"]},
    "experiment": {"data": "digits", "rounds": 3, "clients": 4, "lr": 0.1},
}


def made(**changes: Any) -> Study:
    return Study.of({**BASE, **changes})


def test_the_grid_times_methods_times_seeds() -> None:
    jobs = made().jobs()
    assert len(jobs) == 2 * 2 * 2
    assert len({j.folder for j in jobs}) == 8
    assert {j.experiment.local["lr"] for j in jobs} == {0.1}
    assert [j.label for j in jobs[:2]] == ["fedavg", "fedprox mu=0.1"]
    assert jobs[1].experiment.settings == {"mu": 0.1}


def test_folders_follow_everything_that_decides_a_run() -> None:
    names = {j.folder for j in made().jobs()}
    assert {j.folder for j in made().jobs()} == names
    assert {j.folder for j in made(seeds=3).jobs()} > names
    assert {j.folder for j in made(methods=[*BASE["methods"], "solo"]).jobs()} > names
    other = made(experiment={**BASE["experiment"], "lr": 0.2})
    assert not {j.folder for j in other.jobs()} & names
    # a setting that is written out as its default is the same run; so is another label
    default = {j.folder for j in made(methods=["fedprox"]).jobs()}
    assert {j.folder for j in made(methods=[{"method": "fedprox", "mu": 0.01, "label": "x"}]).jobs()} == default


def test_a_changed_file_of_ones_own_is_another_run(tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    text = "from torch import nn\n\ndef Net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    net.write_text(text)
    before = made(experiment={**BASE["experiment"], "model": f"{net}:Net"}).jobs()[0].folder
    net.write_text(text + "# changed\n")
    assert made(experiment={**BASE["experiment"], "model": f"{net}:Net"}).jobs()[0].folder != before


def test_when_and_presets() -> None:
    values = {
        **BASE,
        "when": {"partition=iid": {"lr": 0.5, "model": "linear"}, "method=fedavg,partition=iid": {"momentum": 0.9}},
        "presets": {"small": {"seeds": 1, "experiment": {"rounds": 1}, "when": {"partition=iid": {"lr": 0.7}}}},
    }
    by = {(j.cell.values["partition"], j.label): j.experiment for j in Study.of(values, "small").jobs()}
    assert len(by) == 4
    assert by["iid", "fedavg"].local["lr"] == 0.7
    assert by["iid", "fedavg"].local["momentum"] == 0.9
    assert by["iid", "fedprox mu=0.1"].local["momentum"] == 0.0
    assert by["iid", "fedavg"].model == "linear"
    assert by["dirichlet:0.1", "fedavg"].local["lr"] == 0.1
    assert {e.rounds for e in by.values()} == {1}
    typed = Study.of(values, "small", {"lr": 0.9, "partition": "iid", "seeds": [7]}).jobs()
    assert [(j.seed, j.experiment.partition, j.experiment.local["lr"]) for j in typed] == [(7, "iid", 0.9)] * 2


def test_cells_are_named_by_what_they_run() -> None:
    study = made(grid={"clients": [3, 4], "topology": ["star"]}, when={"clients=4": {"partition": "shards:2"}})
    assert [c.name for c in study.cells] == [
        "digits, dirichlet:0.5, clients 3, star",
        "digits, shards:2, clients 4, star",
    ]


def test_all_methods_of_a_cell_share_split_weights_and_turns() -> None:
    study = made(methods=["fedavg", "fedprox", "scaffold", "fedbn", "solo"], experiment={"clients": 4, "cohort": 0.5})
    for seed in study.seeds:
        jobs = [j for j in study.jobs() if j.seed == seed and j.cell.values["partition"] == "dirichlet:0.1"]
        built = [j.experiment.build() for j in jobs]
        method, fed = built[0]
        for other, theirs in built[1:]:
            for name, data in fed.clients.items():  # type: ignore[attr-defined]
                for part in ("train", "valid", "test"):
                    same = getattr(theirs.clients[name], part).index  # type: ignore[attr-defined]
                    assert torch.equal(getattr(data, part).index, same)
            ours, weights = method.task.init(fed.seed), other.task.init(theirs.seed)
            assert all(torch.equal(ours[k], weights[k]) for k in ours)
            for fed.round in range(5):
                theirs.round = fed.round
                assert fed.sample(0.5) == theirs.sample(0.5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"metods": []}, "did you mean 'methods'"),
        ({"methods": []}, "has no methods"),
        ({"methods": ["fedagv"]}, "did you mean 'fedavg'"),
        ({"methods": [{"method": "fedprox", "mue": 1}]}, "did you mean 'mu'"),
        ({"methods": [{"method": "fedprox", "clients": 3}]}, "all methods share it"),
        ({"methods": ["fedavg", "fedavg"]}, "another label"),
        ({"methods": [3]}, "A method is a name"),
        ({"reference": "fedprox"}, "it must be one of the study's methods"),
        ({"proposed": ["fedbn"]}, "proposed method"),
        ({"proposed": ["fedavg", "fedprox mu=0.1"]}, "at least one baseline"),
        ({"grid": {"partition": []}}, "at least one value"),
        ({"grid": {"partition": "iid"}}, "takes a list"),
        ({"grid": {"partition": ["iid", "iid"]}}, "twice"),
        ({"grid": {"partion": ["iid"]}}, "did you mean 'partition'"),
        ({"grid": {"seed": [1]}}, "at the top of the study"),
        ({"grid": ["iid"]}, "must be a table"),
        ({"experiment": {"round": 3}}, "did you mean 'rounds'"),
        ({"experiment": {"rounds": "many"}}, "whole number"),
        ({"experiment": {"data": "minst"}}, "did you mean 'mnist'"),
        ({"experiment": {"data": "there/is/none.npz"}}, "check the path"),
        ({"experiment": {"model": "cn"}}, "Unknown model"),
        ({"grid": {"partition": ["dirichlett:1"]}}, "did you mean 'dirichlet'"),
        ({"when": {"partition": {"lr": 1}}}, "FIELD=VALUE"),
        ({"when": {"partition=idd": {"lr": 1}}}, "did you mean 'iid'"),
        ({"when": {"partion=iid": {"lr": 1}}}, "did you mean 'partition'"),
        ({"when": {"method=fedbn": {"lr": 1}}}, "Unknown method in"),
        ({"when": {"partition=iid": {"partition": "iid"}}}, "which the grid varies"),
        ({"when": {"partition=iid": {"larning": 1}}}, "Unknown field in"),
        ({"seeds": 0}, "a number of seeds"),
        ({"seeds": [1, 1]}, "listed twice"),
        ({"seeds": [-1]}, "at least 0"),
        ({"target": 90}, "in 0..1"),
        ({"measure": "median"}, "Unknown measure"),
        ({"paper": {"numbers": [{"global": 1}]}}, "each with a `method`"),
        ({"paper": {"numbers": [{"method": "fedavg", "global": "90 %"}]}}, "is a number"),
        ({"presets": {"laptop": {"sedes": 1}}}, "did you mean 'seeds'"),
        ({"tune_budget": -1}, "tune_budget"),
    ],
)  # fmt: skip
def test_a_bad_study_is_one_clear_sentence(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(Mistake) as e:
        made(**changes)
    assert text in str(e.value)
    assert "\n" not in str(e.value)


def test_unknown_presets() -> None:
    with pytest.raises(Mistake, match="did you mean 'laptop'"):
        Study.of({**BASE, "presets": {"laptop": {}, "paper": {}}}, "labtop")
    with pytest.raises(Mistake, match="has no presets"):
        Study.of(BASE, "laptop")


@pytest.mark.parametrize(
    ("tune", "text"),
    [
        ({"muu": [1]}, "did you mean 'mu'"),
        ({"mu": 1}, "list of values"),
        ({"mu": []}, "list of values"),
        ({"fedbm": {"mu": [1]}}, "method in [tune]"),
        ({"fedprox": {"server_lr": [1]}}, "setting of fedprox"),
    ],
)
def test_bad_tuning(tune: dict[str, Any], text: str) -> None:
    with pytest.raises(Mistake) as e:
        trials(made(methods=["fedavg", "fedprox"], tune=tune))
    assert text in str(e.value)


def test_tuning_needs_validation_rows() -> None:
    with pytest.raises(Mistake, match="validation rows"):
        trials(made(methods=["fedprox"], tune={"mu": [0.1, 1]}, experiment={"valid": 0.0}))


def test_every_method_gets_the_same_tuning_budget() -> None:
    study = made(methods=["fedavg", "fedprox", "solo"], tune={"mu": [0.01, 0.1, 1.0], "lr": [0.1, 0.2]}, grid={})
    jobs = trials(study)
    assert budget(study) == 6
    assert {label: sum(j.label == label for j in jobs) for label in ("fedavg", "fedprox", "solo")} == {
        "fedavg": 6,
        "fedprox": 6,
        "solo": 6,
    }
    assert not {j.seed for j in jobs} & set(study.seeds)
    limited = trials(
        made(methods=["fedavg", "fedprox"], tune={"mu": [0.01, 0.1, 1.0], "lr": [0.1, 0.2]}, grid={}, tune_budget=2)
    )
    assert {label: sum(j.label == label for j in limited) for label in ("fedavg", "fedprox")} == {
        "fedavg": 2,
        "fedprox": 2,
    }


def test_what_is_fixed_is_not_tuned() -> None:
    assert trials(made(methods=["fedavg", {"method": "fedprox", "mu": 0.1}], tune={"mu": [0.01, 1.0]})) == []


def test_typed_values() -> None:
    assert one_method("fedprox:mu=0.1:lr=1") == {"method": "fedprox", "mu": 0.1, "lr": 1}
    assert one_method("my.py:Mine") == "my.py:Mine"
    assert one_method("my.py:Mine:mu=2") == {"method": "my.py:Mine", "mu": 2}
    assert [value(t) for t in ("1", "0.5", "true", "odds")] == [1, 0.5, True, "odds"]
    assert several("data", "mnist,cifar10") == ["mnist", "cifar10"]
    assert several("weights", "a,b") == "a,b"


@pytest.mark.parametrize("name", ["laptop", "near", "paper"])
def test_the_shipped_experiments_can_be_read(name: str) -> None:
    for file in sorted(Path(__file__).parents[2].glob("experiments/*/study.toml")):
        if f"[presets.{name}" in file.read_text():
            assert Study.read(file, name).jobs()


def test_cells_may_be_listed_one_by_one() -> None:
    cells = [{"data": "digits", "partition": "iid"}, {"data": "wine", "partition": "dirichlet:0.5"}]
    study = made(cells=cells, grid={}, when={"data=wine": {"model": "mlp"}})
    assert [c.values for c in study.cells] == cells
    assert [j.experiment.model for j in study.jobs()[:4]] == ["auto", "auto", "mlp", "mlp"]
    assert len(made(cells=cells, grid={"clients": [3, 4]}).cells) == 4
    typed = Study.of({**BASE, "cells": cells, "grid": {}}, typed={"data": "digits"})
    assert [c.values for c in typed.cells] == [{"partition": "iid"}, {"partition": "dirichlet:0.5"}]
    for wrong, words in (
        ({"cells": [], "grid": {}}, "list of tables"),
        ({"cells": [{"partion": "iid"}], "grid": {}}, "did you mean 'partition'"),
        ({"cells": cells}, "keep it in one place"),
        ({"cells": [cells[0], cells[0]], "grid": {}}, "twice"),
    ):
        with pytest.raises(Mistake, match=words):
            made(**wrong)
