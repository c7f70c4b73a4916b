"""FEDSBME: where it becomes FedAvg, what its server does, three results, traffic, topologies, memory. B1-B8: test_posterior."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from kilter import SGD, Mistake, Result, Store, Task, federate
from kilter.blocks import ensemble
from kilter.core import Data, Method, Node, Rows
from kilter.methods.fedavg import FedAvg
from kilter.methods.fedavg_tuned import FedAvgTuned
from kilter.methods.fedsbme import FedSBME
from kilter.params import average, buffers, mean, weights
from kilter.records import ensemble_file, wire
from kilter.records.types import Round
from small import bench, federation, mlp_task, near, normed_task, public, same, skewed, three_ways

PLAN = SGD(lr=0.1, batch=16)
BARE: dict[str, Any] = {"pretrain": 0, "swa_start": 1.0, "lr_schedule": "constant"}  # nothing but the posterior


def fedsbme(task: Task | None = None, **settings: Any) -> FedSBME:
    plan = settings.pop("local", PLAN)
    return FedSBME(task=task or mlp_task(), local=plan, **{"server_epochs": 2, "server_batch": 32} | settings)


def run(method: Method, rounds: int = 2, **options: Any) -> Result:
    with federation(**options) as fed:
        return federate(method, fed, rounds, evaluate_every=rounds)


def equal_clients(n: int = 4) -> dict[str, Data]:
    return {f"c{k}": three_ways(torch.arange(1300).reshape(n, -1)[k, :60].numpy()) for k in range(n)}


# Where it becomes FedAvg --------------------------------------------------------------------------------------------


def test_without_samples_the_plain_mean_of_equal_clients_is_fedavg() -> None:
    """METHODS 9.1. E = {mean} U clients, and with equal sizes the mean of the mean and the clients is the mean."""
    clients = equal_clients()
    ours = run(fedsbme(samples=0, server_mode="average", kappa=0.0, **BARE), clients=clients)
    assert near(ours.state["theta"], run(FedAvg(task=mlp_task(), local=PLAN), clients=clients).state, 1e-5)


def test_with_unequal_sizes_the_mean_of_the_ensemble_differs_from_fedavg() -> None:
    ours = run(fedsbme(samples=0, server_mode="average", **BARE), 1)
    e = ours.state["ensemble"]
    sizes = [len(d.train) for d in skewed().values()]
    wanted = average([(e["mean"], 1.0), *((w, 1.0) for w in e["clients"])])
    assert near(ours.state["theta"], wanted)
    assert near(e["mean"], average(zip(e["clients"], sizes, strict=True)))


@pytest.mark.parametrize("settings", [{}, {"posterior": "dirichlet"}])
def test_a_server_that_does_not_train_leaves_fedavg(settings: dict[str, Any]) -> None:
    """Whatever the posterior: it shows in the ensemble, not in the model."""
    ours = run(fedsbme(server_epochs=0, **BARE, **settings))
    assert near(ours.state["theta"], run(FedAvg(task=mlp_task(), local=PLAN)).state, 1e-5)


def test_without_swa_supervised_is_fedavg_and_the_same_tuning() -> None:
    both = {"server_epochs": 2, "server_batch": 32, "pretrain": 1, "swa_start": 1.0}
    ours = run(fedsbme(**both, lr_schedule="constant"))
    assert near(ours.state["theta"], run(FedAvgTuned(task=mlp_task(), local=PLAN, **both)).state, 1e-5)


# The server ---------------------------------------------------------------------------------------------------------


def node(**more: Any) -> Node:
    nothing = Rows({}, torch.empty(0, dtype=torch.int64))
    return Node("server", Data(nothing, nothing, nothing), public=public(), **more)


def test_the_losses_of_the_server_by_hand() -> None:
    method = fedsbme(server_mode="distill")
    w, batch = method.task.init(0), public().batch()
    outputs = method.task.outputs(w, batch["x"])
    batch["target"] = torch.softmax(outputs, 1)
    assert float(method.distil(w, batch, None)) == pytest.approx(0, abs=1e-6)
    half = replace(method, server_mode="both").distil(w, batch, None)
    assert float(half) == pytest.approx(float(cross_entropy(outputs, batch["y"])) / 2, abs=1e-6)


def test_distillation_ignores_labels() -> None:
    wrong = Rows.of(x=public()["x"], y=(public()["y"] + 1) % 10)
    actual = [run(fedsbme(server_mode="distill", pretrain=0), public=rows).state["theta"] for rows in (public(), wrong)]
    assert same(*actual)
    other = run(fedsbme(server_mode="both", pretrain=0), public=wrong).state["theta"]
    assert not near(other, actual[0], 1e-3)


def test_average_is_the_plain_mean_of_the_ensemble() -> None:
    state = run(fedsbme(server_mode="average", posterior="dirichlet")).state
    assert near(state["theta"], mean(ensemble.members(state["ensemble"])))


def test_the_posterior_does_not_depend_on_the_aggregator() -> None:
    star, rotating = (run(fedsbme(pretrain=0, server_epochs=0), topology=t).state for t in ("star", "rotating"))
    assert same(star["ensemble"], rotating["ensemble"])


@pytest.mark.parametrize("settings", [{}, {"posterior": "dirichlet"}, {"norm_deltas": True, "scale": 0.1}])
def test_batchnorm_is_not_sampled(settings: dict[str, Any]) -> None:
    method = fedsbme(normed_task(), **settings, local=SGD(lr=0.1, batch=16, epochs=2))
    e = run(method, 1).state["ensemble"]
    assert ensemble.size(e) == 1 + 4 + 4
    for w in ensemble.samples(e):
        assert float(w["~body.2.running_var"].min()) > 0
        assert same(buffers(w), buffers(ensemble.refresh_batchnorm(method.task, w, public())))
        assert not near(weights(w), weights(e["mean"]), 1e-3)


def test_swa_averages_the_last_epochs() -> None:
    method = fedsbme(kappa=1.0, swa_start=0.5, local=SGD(lr=0.1, batch=0, epochs=4))
    me = node()
    me.data = equal_clients()["c0"]
    work = method.train(me, (method.task.init(0), 0.1))
    fit = next(work)
    epochs, seen = [], []
    try:
        while True:
            epochs.append(fit.plan.epochs)
            w = {k: v + len(epochs) for k, v in fit.params.items()}
            seen.append(w)
            fit = work.send(w)
    except StopIteration as end:
        actual, s2, n = end.value
    assert epochs == [2, 1, 1]
    assert near(actual, mean(seen[1:]))
    assert all(float(v.mean()) == pytest.approx(2.25, rel=1e-4) for v in s2.values())  # two snapshots 3 apart
    assert n == 42


# What is reported and sent ------------------------------------------------------------------------------------------


def test_three_results_are_always_reported() -> None:
    with federation() as fed:
        actual = federate(fedsbme(), fed, 3)
    for record in actual.rounds[1:]:
        assert record.variants.keys() == {"mean", "trained", "ensemble"}
        assert record.variants["trained"]["accuracy"] == record.global_metrics["accuracy"]
        assert "per_class" not in record.variants["mean"]
    last = actual.summary.last.variants
    assert len(last["ensemble"].per_class["specificity"]) == 10
    assert {"calibration_error", "entropy"} <= last["ensemble"].metrics.keys()
    p = ensemble.probabilities(mlp_task(), actual.state["ensemble"], bench())
    assert last["ensemble"].metrics["accuracy"] == pytest.approx(float((p.argmax(1) == bench()["y"]).double().mean()))
    assert last["ensemble"].metrics["loss"] == pytest.approx(
        float(torch.nn.functional.nll_loss(p.log(), bench()["y"])), rel=1e-5
    )


def test_other_methods_have_no_variants() -> None:
    actual = run(FedAvg(task=mlp_task(), local=PLAN), 1)
    assert actual.rounds[1].variants == actual.summary.last.variants == {}


def test_a_stopped_run_resumes_and_saves_its_ensemble(tmp_path) -> None:
    def stop(record: Round) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with federation() as fed:
        whole = federate(fedsbme(), fed, 3)
    store = Store(tmp_path)
    with federation() as fed, pytest.raises(KeyboardInterrupt):
        federate(fedsbme(), fed, 3, store=store, checkpoint_seconds=0, watch=stop)
    with federation() as fed:
        again = federate(fedsbme(), fed, 3, store=store)
    assert same(again.state, whole.state)
    assert same(ensemble_file.load(tmp_path), whole.state["ensemble"])


def test_variances_are_sent_only_with_kappa() -> None:
    size = wire.size(mlp_task().init(0))
    plain, both = (run(fedsbme(kappa=k, local=SGD(lr=0.1, batch=16, epochs=4)), 1).rounds[1] for k in (0.0, 1.0))
    assert plain.bytes_up == pytest.approx(4 * size, rel=0.05)
    assert both.bytes_up == pytest.approx(8 * size, rel=0.05)
    for record in (plain, both):
        assert record.bytes_down == pytest.approx(4 * size, rel=0.05)
        assert record.evaluation_bytes_down == pytest.approx(4 * size, rel=0.1)  # not the others' models


def test_stacked_and_one_by_one_agree() -> None:
    method = fedsbme(kappa=1.0, local=SGD(lr=0.1, batch=16, epochs=4))
    assert near(*(run(method, 2, stack=stack).state["theta"] for stack in (True, False)), 1e-4)


def test_clients_may_be_missing() -> None:
    def faults(seed: int, round: int, name: str, step: str) -> str | None:
        return "away" if step == "train" and (name == "c1" or round == 1) else None

    actual = run(fedsbme(), 2, faults=faults)
    assert len(actual.state["ensemble"]["clients"]) == 3
    with pytest.warns(UserWarning, match="No reply of any client"):
        none = run(fedsbme(), 1, faults=faults)
    assert none.state["ensemble"] is None
    assert none.rounds[1].variants == {}


def test_peers_are_refused() -> None:
    with pytest.raises(Mistake, match="needs one aggregator and so cannot run under 'ring': use --topology star"):
        run(fedsbme(), topology="ring")


@pytest.mark.parametrize(
    "bad",
    [
        {"samples": -1},
        {"gamma": 0.0},
        {"temperature": 0.0},
        {"kappa": -1.0},
        {"swa_start": -0.5},
        {"server_batch": -3},
        {"kappa": 1.0, "swa_start": 1.0},
    ],
)
def test_invalid_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(Mistake, match=next(iter(bad))):
        fedsbme(**bad)


# As printed, and the paper's steps 4-5 --------------------------------------------------------------------------------


def test_b1_as_printed_the_mean_shrinks_by_t() -> None:
    m = fedsbme(equations="printed", local=SGD(lr=0.1, batch=16, epochs=3), swa_start=0.0, server_mode="average")
    assert m.averaged == 3
    thetas, sizes = ([1.0, 2.0], [3.0, 0.0], [5.0, 4.0]), (100, 300, 600)
    replies = [({"w": torch.tensor(t)}, None, n) for t, n in zip(thetas, sizes, strict=True)]
    hub = Node("server", None, public=public(), step="combine")
    e = replace_task(m).posterior_of(hub, {"w": torch.zeros(2)}, replies)
    assert e["mean"]["w"].tolist() == pytest.approx([1.333333, 0.866667], abs=1e-6)


def replace_task(m: FedSBME) -> FedSBME:
    """The same method over a bare vector of two weights."""
    from small import linear_task

    return replace(m, task=linear_task([0.0, 0.0]))


def test_b2_as_printed_the_weights_do_not_sum_to_one() -> None:
    from kilter.blocks.posterior import mixture, printed_shares
    from kilter.seeds import numpy_generator

    class Fixed:
        def dirichlet(self, concentration: list[float], count: int) -> Any:
            assert concentration == [2.0, 2.0, 2.0]  # gamma + 1
            return torch.tensor([[0.2, 0.3, 0.5]]).double()

    (shares,) = printed_shares([100, 300, 600], 1.0, 1, Fixed())  # type: ignore[arg-type]
    assert sum(shares) == pytest.approx(0.002439, abs=1e-6)
    shrunk = mixture([{"w": torch.ones(2)}] * 3, shares)
    assert shrunk["w"].tolist() == pytest.approx([0.002439] * 2, abs=1e-6)
    assert len(printed_shares([1, 2], 1.0, 3, numpy_generator(0))) == 3


def test_server_mode_samples_trains_each_sample_and_averages_them() -> None:
    bare = {**BARE, "samples": 3, "posterior": "dirichlet"}
    untrained = run(fedsbme(server_mode="samples", server_epochs=0, **bare), 1).state
    expected = mean(list(ensemble.samples(untrained["ensemble"])))
    assert same(untrained["theta"], expected)
    trained = run(fedsbme(server_mode="samples", **bare), 1).state
    assert not near(trained["theta"], expected, 1e-3)
    again = run(fedsbme(server_mode="samples", **{**bare, "gamma": 5.0}), 1).state
    assert not near(trained["theta"], again["theta"], 1e-4)  # the posterior reaches the model


def test_a_cycle_averages_only_its_end() -> None:
    m = fedsbme(**{**BARE, "swa_start": 0.0, "swa_cycle": 2}, local=SGD(lr=0.1, batch=0, epochs=4))
    assert m.averaged == 2
    with federation(stack=False) as fed:
        federate(m, fed, 1)


@pytest.mark.parametrize("mode", ["samples", "distill"])
def test_a_server_that_diverges_keeps_the_last_model(mode: Any) -> None:
    result = run(fedsbme(server_mode=mode, server_lr=1e30, pretrain=0), 1)
    assert all(bool(torch.isfinite(v).all()) for v in result.state["theta"].values())
    assert any("server's model was not finite" in n.what for n in result.summary.notices)


def test_sharpening_does_not_underflow() -> None:
    from kilter.blocks.posterior import sharpen

    p = torch.softmax(torch.tensor([[0.3, 0.2, 0.1], [60.0, 0.0, -60.0]]), 1)
    for temperature in (0.5, 1e-2, 1e-4):
        q = sharpen(p, temperature)
        assert bool(torch.isfinite(q).all())
        assert torch.allclose(q.sum(1), torch.ones(2))
    assert sharpen(p, 1e-4)[0].tolist() == [1.0, 0.0, 0.0]


def test_an_ensemble_of_regressions_is_the_mean_of_outputs() -> None:
    from small import linear_task

    task = linear_task([0.0, 0.0])
    e = ensemble.ensemble(
        {"w": torch.tensor([3.0, 0.0])}, [{"w": torch.tensor([0.0, 6.0])}, {"w": torch.tensor([3.0, 3.0])}]
    )
    mean_ = ensemble.probabilities(task, e, Rows.of(x=torch.zeros(2, 1)), classes=False)
    assert mean_.tolist() == [[2.0, 3.0]] * 2


# Memory -------------------------------------------------------------------------------------------------------------

LARGE = """
import resource
import torch
from kilter import SGD, Data, Rows, Simulation, Task, federate
from kilter.methods.fedsbme import FedSBME
from kilter.models import build

rows = Rows.of(x=torch.rand(8, 3, 32, 32), y=torch.arange(8) % 3)
clients = {f"c{k}": Data(rows.take(torch.arange(4)), rows.take(torch.arange(1)), rows.take(torch.arange(1))) for k in range(4)}
task = Task(lambda: build("resnet50", (3, 32, 32), 3))
method = FedSBME(
    task=task, local=SGD(lr=0.01, momentum=0.9, batch=4, epochs=2), kappa=1.0, server_epochs=1, pretrain=1, swa_start=0.0
)
with Simulation(clients, bench=rows, public=rows) as fed:
    found = federate(method, fed, 2, evaluate_every=2)
assert found.summary.last.variants["ensemble"]["accuracy"] >= 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_resnet50_of_four_clients_and_four_samples_fits_in_four_gigabytes() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=280, check=True)
    kilobytes = int(done.stdout) / (1024 if sys.platform == "darwin" else 1)
    assert kilobytes < 4e6
