"""Tasks other than classification at real sites: the same as in simulation, with pooled statistics of the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from place import Place
from sites import make_site, make_terms

from kilter import data as kdata
from kilter.data import Column, Preparation, Schema
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.inference.model_folder import load_model
from kilter.net.data_description import DataDescription
from kilter.net.terms import Terms, frozen_digest


def write_ages(path: Path, shift: int) -> Path:
    lines = ["dose,sex,age,ill"]
    lines += [f"{k / 10},{'fm'[k % 2]},{shift + 2 * k},{int(k % 4 == 0)}" for k in range(40)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_regression_at_sites_learns_in_the_units_of_all_of_them(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", rounds=2, task="regression", label="age", drop="ill", model="mlp:8")
    for name, shift in (("a", 0), ("b", 50), ("c", 100)):
        write_ages(here.folder / f"{name}.csv", shift)
    server = here.serve("--data", "none")
    words = ["--task", "regression", "--label", "age", "--drop", "ill"]
    sites = [here.join(name, "--data", f"{name}.csv", *words) for name in here.sites]
    server.wait()
    for site in sites:
        site.wait()
    mean, std = Preparation.load(here.folder / "run").target_moments
    assert mean == pytest.approx(89, abs=6)
    assert std > 40
    client = here.summary()["last"]["client"]
    assert {"mae", "rmse", "loss"} <= set(client)
    assert here.summary()["directions"]["mae"] == "lower"
    (folder,) = (here.folder / "state-b/models").iterdir()
    model = load_model(folder)
    assert model.task.units == pytest.approx((mean, std))


def test_class_weights_are_counted_over_all_sites(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", rounds=1, loss="class-weights", label="ill", drop="age", model="mlp:8")
    for name in here.sites:
        write_ages(here.folder / f"{name}.csv", 0)
    server = here.serve("--data", "none")
    sites = [here.join(name, "--data", f"{name}.csv", "--label", "ill", "--drop", "age") for name in here.sites]
    server.wait()
    for site in sites:
        site.wait()
    well, ill = Preparation.load(here.folder / "run").class_counts
    assert well > 2 * ill > 0
    assert here.summary()["failures"] == 0


def test_a_site_without_the_task_is_told_what_to_do(tmp_path: Path) -> None:
    path = write_ages(tmp_path / "a.csv", 0)
    numbers, classes = (
        DataDescription.of(kdata.load(path, table=kdata.TableOptions(label, task=task)))
        for label, task in (("age", "regression"), ("ill", ""))
    )
    assert DataDescription.parse(numbers.plain()) == numbers
    experiment = Experiment.of({"task": "regression", "model": "mlp:8"})
    with pytest.raises(Mistake, match="a site gives --task"):
        experiment.make(**classes.row_facts(None))
    assert experiment.make(**numbers.row_facts(None)).task.main == "mae"


def test_frozen_weights_are_part_of_the_terms_and_verified(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    site = make_site(tmp_path)
    settings = {
        "model": "mlp:8:2",
        "lora": "r=2,targets=3",
        "valid": 0.2,
        "rounds": 3,
        "local": {"lr": 0.1, "batch": 16},
    }
    digest = frozen_digest(Experiment.of(settings), DataDescription.of(site.dataset))
    assert len(digest) == 32
    terms = replace(make_terms(site, **settings), frozen=digest)
    assert Terms.parse(terms.head()) == terms
    assert terms.digest != replace(terms, frozen="").digest
    site.agree(terms)
    with pytest.raises(Mistake, match="The frozen weights here differ from those of the terms"):
        site.consider(replace(terms, frozen="0" * 32))
    plain = Experiment.of({**settings, "lora": ""})
    assert frozen_digest(plain, DataDescription.of(site.dataset)) == ""
    site.close()


def test_frozen_weights_of_tables_are_known_if_no_width_follows_from_statistics() -> None:
    pytest.importorskip("peft")
    experiment = Experiment.of({"model": "mlp:8:2", "lora": "r=2,targets=3"})
    number, word = Column("a", "number"), Column("b", "category")
    for columns, known in (((number,), True), ((number, word), False), ((number, replace(word, embed=4)), True)):
        schema = Schema(columns, "y", ("0", "1"))
        description = DataDescription((len(columns),), schema.classes, schema=schema)
        assert bool(frozen_digest(experiment, description)) == known
