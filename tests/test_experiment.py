"""The experiment file: what it takes, what it refuses, and that it repeats a run."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter import Mistake, federate
from kilter.experiment import Experiment
from kilter.records.toml_file import read_toml
from kilter.train import SGD

SMALL = {"rows": 300, "clients": 3, "rounds": 2, "model": "linear", "partition": "iid"}


def test_written_file_reads_as_the_same_experiment(tmp_path):
    e = Experiment.of({**SMALL, "method": "fedprox", "settings": {"mu": 0.3}, "local": {"lr": 0.05}})
    path = tmp_path / "experiment.toml"
    path.write_text(e.write())
    assert Experiment.read(path) == e
    assert read_toml(path)["versions"]["torch"]


def test_written_file_repeats_the_run(tmp_path):
    e = Experiment.of({**SMALL, "method": "scaffold"})
    (tmp_path / "e.toml").write_text(e.write())
    first, second = (federate(*x.build(), rounds=x.rounds) for x in (e, Experiment.read(tmp_path / "e.toml")))
    assert first.summary.last == second.summary.last


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"metod": "fedavg"}, "did you mean 'method'"),
        ({"method": "fedporx"}, "did you mean 'fedprox'"),
        ({"method": "fedprox", "settings": {"mo": 1}}, "did you mean 'mu'"),
        ({"method": "solo", "settings": {"mu": 1}}, "no settings of its own"),
        ({"method": "fedprox", "settings": {"mu": "strong"}}, "takes a number"),
        ({"clients": "ten"}, "whole number"),
        ({"clients": 2.5}, "whole number"),
        ({"clients": -1}, "at least 0"),
        ({"rounds": 0}, "at least 1"),
        ({"cohort": 0.0}, "cohort of the experiment must be above 0 and at most 1, not 0.0"),
        ({"cohort": float("nan")}, "finite number above 0 and at most 1, not nan"),
        ({"missing": 1.0}, "missing of the experiment must be at least 0 and below 1, not 1.0"),
        ({"valid": 1.0}, "valid of the experiment must be at least 0 and below 1, not 1.0"),
        ({"test": -0.1}, "test of the experiment must be at least 0 and below 1, not -0.1"),
        ({"local": {"lr": -1}}, "lr of SGD must be above 0, not -1.0"),
        ({"local": {"lr": float("nan")}}, "lr of SGD must be a finite number above 0, not nan"),
        ({"local": {"momentum": 1}}, "momentum of SGD must be at least 0 and below 1, not 1.0"),
        ({"local": {"epochs": 0}}, "epochs of SGD must be at least 1, not 0"),
        ({"method": "fedprox", "settings": {"mu": -1}}, "mu of FedProx must be at least 0, not -1.0"),
        ({"method": "fedprox", "settings": {"mu": "nan"}}, "mu of FedProx must be a finite number at least 0, not nan"),
        ({"method": "fedsbme", "settings": {"server_batch": -3}}, "server_batch of FedSBME must be at least 0, not -3"),
        (
            {"method": "feddisk", "settings": {"a_min": 20}},
            "a_min of FedDisk must be .* at most a_max, not 20.0 .a_max is 10.0",
        ),
        ({"local": {"lr": True}}, "takes a number"),
        ({"local": {"learning_rate": 0.1}}, "field of the sgd optimiser"),
        ({"local": 3}, "table of fields"),
        ({"optimiser": "adma"}, "did you mean 'adam'"),
        ({"topology": "rign"}, "did you mean 'ring'"),
        ({"topology": "regular:3", "clients": 5}, "product even"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(bad, says):
    with pytest.raises(Mistake, match=says) as caught:
        Experiment.of(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"data": "mnits"}, "mnist"),
        ({"partition": "dirchlet:0.1"}, "did you mean 'dirichlet'"),
        ({"partition": "dirichlet:-1"}, "alpha"),
        ({"clients": 5000}, "clients"),
        ({"rows": 10**7}, "training rows"),
        ({"model": "resnet19"}, "did you mean 'resnet18'"),
        ({"weights": "nowhere.safetensors"}, "nowhere"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(bad, says):
    with pytest.raises(Mistake, match=says):
        Experiment.of({**SMALL, **bad}).build()


def test_a_setting_may_change_the_plan_of_one_method():
    e = Experiment.of(
        {**SMALL, "method": "scaffold", "settings": {"momentum": 0.5}, "local": {"momentum": 0.9, "lr": 0.1}}
    )
    method, _ = e.build()
    assert method.local == SGD(lr=0.1, momentum=0.5)


def test_rows_are_the_same_for_every_seed_and_splits_are_not():
    a, b = (Experiment.of({**SMALL, "seed": s}) for s in (0, 1))
    assert a.dataset().train.tolist() == b.dataset().train.tolist()
    assert len(a.dataset().train) == 300
    assert a.split().clients["c00"].train.index.tolist() != b.split().clients["c00"].train.index.tolist()


def test_adam_is_one_word_away():
    method, _ = Experiment.of({**SMALL, "optimiser": "adam", "local": {"beta1": 0.8}}).build()
    assert method.local.beta1 == 0.8
    assert method.local.lr == 1e-3


@given(
    st.dictionaries(
        st.text(max_size=8), st.one_of(st.none(), st.integers(), st.text(max_size=5), st.floats()), max_size=4
    )
)
def test_no_foreign_table_gives_anything_but_a_mistake(values):
    with contextlib.suppress(Mistake):
        Experiment.of(values)
