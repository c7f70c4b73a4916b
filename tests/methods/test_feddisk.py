"""FedDisk: known answers D1, D4-D11, its laws, and clients that are hard to weigh."""

from __future__ import annotations

import pytest
import torch

from kilter import SGD, Data, Mistake, Rows, Simulation, Task, federate
from kilter.blocks.density import ratio
from kilter.blocks.density.made import MADE, density_task
from kilter.blocks.density.ratio import effective_size, normalised, weights_by_classifier
from kilter.core import Node, step
from kilter.data.partitions import noise_std
from kilter.methods.feddisk import FedDisk
from kilter.models import build
from kilter.params import count
from kilter.runtimes.step_runner import run_step
from kilter.seeds import generator
from kilter.study.statistics import cost_paper, curve, ecr_paper, rounds_to_target
from small import SHAPE, digits, federation, linear_task, method, mlp_task, same, skewed, three_ways

RULES = ["llr", "dre", "odds", "prob", "minmax2", "tri"]
QUICK = {"density_rounds": 3, "density_epochs": 1, "own_epochs": 5, "hidden": 8}


def close(actual, expected, tolerance=1e-6):
    return [float(v) for v in actual] == pytest.approx(expected, abs=tolerance)


# The paper's cost ---------------------------------------------------------------------------------------------------

SIZES = {"xray": (39_000, 102_000), "femnist": (447_000, 614_000), "mnist": (12_000, 47_000)}  # Table II: network, MADE
ECR = {  # Table I: rounds of each baseline; FedDisk's rounds of classifier and of MADE
    "xray": {"FedAvg": 450, "FedBN": 457, "FedProx": 440, "FedROD": 480, "FedPCL": 500, "FedDisk": (100, 80)},
    "femnist": {"FedAvg": 1100, "FedBN": 1255, "FedProx": 1200, "FedROD": 1015, "FedPCL": 1030, "FedDisk": (105, 15)},
    "mnist": {"FedAvg": 500, "FedBN": 600, "FedProx": 800, "FedROD": 550, "FedPCL": 550, "FedDisk": (85, 70)},
}
COST = {
    "xray": [35_100_000, 35_646_000, 34_320_000, 37_440_000, 39_000_000, 24_120_000],
    "femnist": [983_400_000, 1_121_970_000, 1_072_800_000, 907_410_000, 920_820_000, 112_290_000],
    "mnist": [12_000_000, 14_400_000, 19_200_000, 13_200_000, 13_200_000, 8_620_000],
}


@pytest.mark.parametrize(
    ("data", "ecr", "ratio"), [("xray", 180, 1.422886), ("femnist", 120, 8.080951), ("mnist", 155, 1.392111)]
)
def test_d1_cost_table_of_the_paper(data, ecr, ratio):  # D1
    network, made = SIZES[data]
    *baselines, (classifier, density) = ECR[data].values()
    actual = [cost_paper([(r, network)]) for r in baselines] + [cost_paper([(classifier, network), (density, made)])]
    assert actual == COST[data]
    assert classifier + density == ecr
    assert min(actual[:-1]) / actual[-1] == pytest.approx(ratio, abs=1e-6)


def test_density_models_have_the_papers_size():  # D2
    for inputs, hidden, size in [(1024, 50, 102_400), (784, 30, 47_040)]:
        assert sum(w.numel() for w in MADE(inputs, hidden).parameters() if w.dim() > 1) == size


def test_effective_communication_rounds():  # D10
    base, ours = curve([0.10, 0.30, 0.50, 0.50, 0.60, 0.59]), curve([0.20, 0.55, 0.61, 0.62, 0.62, 0.63])
    actual = ecr_paper({"fedavg": base}, {"feddisk": ours}, {"feddisk": 2})
    assert (actual.rounds, actual.target) == ({"fedavg": 5, "feddisk": 5}, 0.6)
    assert rounds_to_target(ours, 0.9) is None


def test_noise_of_the_papers_clients():  # D9
    assert close([noise_std(k, 0.3, 100) for k in (0, 1, 50, 99)], [0, 0.054772, 0.387298, 0.544977])
    assert close([noise_std(k, 0.3, 100, is_std=True) for k in (0, 1, 50, 99)], [0, 0.003, 0.15, 0.297])


def test_loss_is_divided_by_rows_and_weights_are_clipped():  # D11
    task = linear_task([1.0])
    batch = {"x": torch.zeros(3, 1), "y": torch.tensor([[1.0], [2.0], [4.0]]), "weight": torch.tensor([0.5, 1.5, 2.0])}
    assert float(task.loss(task.init(0), batch)) == pytest.approx(3.833333, abs=1e-6)
    a = weights_by_classifier(torch.tensor([1e-4, 0.3, 0.5, 0.9, 0.9999], dtype=torch.float64), delta=0.01).clamp(
        0.1, 10
    )
    assert close(a, [0.1, 0.428571, 1, 9, 10])
    assert close(normalised(a, 0.1, 10), [0.024356, 0.104384, 0.243563, 2.192067, 2.435630])


# The method ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch):
    """Judges that learn little: enough to see that the machinery turns."""
    whole = ratio.fit_until_stale

    def short(node, task, w, plan, rows, valid, fits, patience):
        return whole(node, task, w, plan, rows, valid, min(fits, 4), patience)

    monkeypatch.setattr(ratio, "fit_until_stale", short)


def weights_of(fed: Simulation) -> dict[str, torch.Tensor]:
    return {i: fed.states[i]["weight"] for i in fed.ids}


@pytest.mark.parametrize("name", ["feddisk", "feddisk-oracle"])
def test_weights_of_one_are_fedavg_bit_for_bit(brief, name):
    settings = QUICK if name == "feddisk" else {}
    results = []
    for m in (method("fedavg", cohort=0.5), method(name, cohort=0.5, a_min=1.0, a_max=1.0, **settings)):
        with federation() as fed:
            results.append(federate(m, fed, 3))
    assert same(results[0].state, results[1].state)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_weights_and_records_their_effective_size(brief, rule):
    with federation() as fed:
        result = federate(method("feddisk", rule=rule, **QUICK), fed, 1)
        actual = weights_of(fed)
    assert all(len(a) == len(fed.clients[i].train) and a.dtype == torch.float32 for i, a in actual.items())
    assert all(abs(float(a.mean()) - 1) < 1e-5 and float(a.min()) >= 0 for a in actual.values())
    assert any(float(a.std()) > 1e-6 for a in actual.values())
    said = {n.node: n.text for n in result.rounds[0].notes if n.step == "weigh"}
    for i, a in actual.items():
        assert f"weights by {rule}: effective sample size {effective_size(a):.1f} of {len(a)}" == said[i]
        assert set(fed.states[i]) == {"weight"}  # no density model stays behind


def test_identical_clients_have_equal_weights():
    data = three_ways(torch.arange(300).numpy())
    for rule, within in [("llr", 0.05), ("dre", 0.5)]:
        with federation({"a": data, "b": data, "c": data}) as fed:
            federate(method("feddisk", rule=rule, start="global", density_rounds=6, hidden=20), fed, 1)
            assert all(float((a - 1).abs().mean()) < within for a in weights_of(fed).values())


def test_typical_rows_have_larger_weights():
    """One feature, N(0,1) for two clients and N(2,1) for two: llr and dre follow the true ratio p/q, which rises or falls."""
    g = torch.Generator().manual_seed(0)
    clients = {}
    for k, centre in enumerate([0.0, 0.0, 2.0, 2.0]):
        x = centre + torch.randn(300, 1, generator=g)
        rows = Rows.of(x=x, y=torch.zeros(300, dtype=torch.int64))
        clients[f"c{k}"] = Data(
            rows.take(torch.arange(220)), rows.take(torch.arange(220, 260)), rows.take(torch.arange(260, 300))
        )
    task = Task(lambda: build("linear", (1,), 2))
    for rule in ("llr", "dre"):
        with Simulation(clients) as fed:
            federate(
                FedDisk(
                    task=task,
                    local=SGD(),
                    rule=rule,
                    tau=1.0,
                    density_lr=0.05,
                    density_epochs=4,
                    density_rounds=12,
                    own_epochs=48,
                    a_min=0.0,
                ),
                fed,
                1,
            )
            for k, a in enumerate(weights_of(fed).values()):
                x = clients[f"c{k}"].train["x"][:, 0]
                truth = 0.5 + 0.5 * torch.exp((2 * x - 2) * (1 if k < 2 else -1))
                assert float(torch.corrcoef(torch.stack([a.log(), truth.log()]))[0, 1]) > 0.7


def test_density_rounds_stop_and_keep_the_best():
    m = method("feddisk", density_rounds=60, density_epochs=6, own_epochs=6, density_lr=0.05, hidden=40)
    with federation() as fed:
        result = federate(m, fed, 1)
    nll = [p.value for p in result.rounds[0].series if p.series == "validation loss of the density model"]
    assert 4 < len(nll) < 60
    assert nll.index(min(nll)) == len(nll) - 3
    state = {"round": 1, "made": {"w": torch.ones(1)}, "best": None, "nll": 2.0, "stale": 0}
    (worse,) = (m.merge(Node("hub", None), state, {"a": ({"w": torch.zeros(1)}, 3, 5.0)}) for _ in [0])
    assert (worse["stale"], worse["nll"], m.best(worse, "a")) == (1, 2.0, None)
    better = m.merge(Node("hub", None), state, {"a": ({"w": torch.zeros(1)}, 3, 1.0)})
    assert same(better["best"], {"w": torch.ones(1)})
    assert same(m.best(better, "a"), {"w": torch.zeros(1)})
    state["stale"] = 2
    assert m.merge(Node("hub", None), state, {"a": ({"w": torch.zeros(1)}, 3, 1.0)}) is state


def test_the_hidden_size_is_chosen_by_the_validation_loss():
    m = method("feddisk", **QUICK | {"density_rounds": 6}, hidden_choices="2,40")
    with federation() as fed:
        federate(m, fed, 1)
        best = {size: method("feddisk", **QUICK | {"density_rounds": 6, "hidden": size}) for size in (2, 40)}
        losses = {}
        for size, alone in best.items():
            with federation() as again:
                result = federate(alone, again, 1)
            losses[size] = min(p.value for p in result.rounds[0].series if p.series.startswith("validation loss"))
            chosen = same(weights_of(fed)["c0"], weights_of(again)["c0"])
            losses[size] = (losses[size], chosen)
    assert losses[40][0] < losses[2][0]
    assert (losses[2][1], losses[40][1]) == (False, True)
    with pytest.raises(Mistake, match="hidden_choices of FedDisk is a list of sizes"):
        method("feddisk", hidden_choices="30,x")
    with federation(topology="full") as fed, pytest.raises(Mistake, match="peers cannot agree on a size"):
        federate(m, fed, 1)


def test_a_server_reads_a_clients_mean_pixel_from_its_density_model():
    """Eq. 20 bounds one draw from the mixture of all clients. The server sees every client's model, and can read from it."""
    seen = {}

    class Curious(FedDisk):
        @step
        def merge(self, hub, state, replies):
            for name, (w, _, _) in replies.items():
                seen[name] = float(w["says.bias"][0].sigmoid())  # the first output depends on no input
            return super().merge(hub, state, replies)

    def rows(k, part, n):
        x = torch.rand(n, 1, 8, 8, generator=generator(k, part))
        x[:, 0, 0, 0] = torch.bernoulli(torch.full((n,), 0.15 + 0.2 * k), generator=generator(k, part, "pixel"))
        return Rows.of(x=x, y=torch.arange(n) % 10)

    clients = {f"c{k}": Data(rows(k, "train", 80), rows(k, "valid", 10), rows(k, "test", 10)) for k in range(4)}
    task, plan = Task(lambda: build("linear", SHAPE, 10)), SGD()
    m = Curious(task=task, local=plan, density_rounds=1, density_epochs=60, density_lr=0.05, own_epochs=0, hidden=8)
    with Simulation(clients) as fed:
        federate(m, fed, 1)
    means = {name: float(data.train["x"][:, 0, 0, 0].mean()) for name, data in clients.items()}
    assert max(means.values()) - min(means.values()) > 0.5
    assert seen == pytest.approx(means, abs=0.05)


def test_the_ledger_counts_both_phases():
    m = method("feddisk", **QUICK)
    with federation() as fed:
        result = federate(m, fed, 2)
    made = 4 * count(density_task(64, 8, "bernoulli", 0).init(0))
    for up, down in result.rounds[0].bytes_by_node.values():
        # Eq. 19: a density model up and down a round; the first comes from the seed, the last is the best. Headers: < 600 bytes.
        assert 3 * made < up < 3 * (made + 600)
        assert 3 * made < down < 3 * (made + 600) + 200
    model = 4 * count(m.task.init(0))
    assert 4 * model < result.rounds[1].bytes_up < 4 * (model + 600)


def absent(*steps: str):
    return lambda seed, round, node, step: "away" if node == "c1" and step in steps else None


@pytest.mark.parametrize(("name", "steps"), [("feddisk", ("learn", "weigh")), ("feddisk-oracle", ("hand_over",))])
def test_a_client_that_missed_the_density_phase_trains_with_weights_of_one(name, steps):
    settings = QUICK if name == "feddisk" else {}
    with federation(faults=absent(*steps)) as fed:
        result = federate(method(name, **settings), fed, 2)
    assert "weight" not in fed.states.get("c1", {})
    assert "c1" in result.rounds[1].participants
    (notice,) = result.rounds[1].notices
    assert notice.node == "c1"
    assert "weights of one" in notice.what
    (counted,) = [n for n in result.summary.notices if "weights of one" in n.what]
    assert (counted.count, counted.rounds, counted.nodes) == (2, [1, 2], ["c1"])
    assert all("weight" in fed.states[i] for i in ("c0", "c2", "c3"))


@pytest.mark.parametrize("topology", ["rotating", "full", "ring"])
def test_topologies(topology):
    """Over the full graph, peers keep what the star keeps; on a ring everyone has weights of its neighbourhood."""
    settings = {**QUICK, "density_rounds": 4}
    with federation() as star, federation(topology=topology) as fed:
        first, second = (federate(method("feddisk", **settings), f, 2) for f in (star, fed))
        one, other = weights_of(star), weights_of(fed)
    if topology != "ring":
        assert all(torch.allclose(one[i], other[i], atol=1e-5) for i in one)
        assert first.summary.client_accuracy.mean == pytest.approx(second.summary.client_accuracy.mean, abs=0.02)
    assert not second.summary.failures


@pytest.mark.parametrize("rule", ["llr", "dre", "odds", "minmax2"])
def test_clients_with_difficult_data(brief, rule):
    """Five rows, rows that are all one picture, one class, and no validation rows."""
    table = digits()
    blank = Rows.of(x=torch.zeros(20, *SHAPE), y=torch.zeros(20, dtype=torch.int64))
    ones = torch.nonzero(table["y"][:600] == 1).flatten()
    few = three_ways(torch.arange(7).numpy())
    clients = skewed(2) | {
        "few": few,
        "blank": Data(blank.take(torch.arange(14)), blank.take(torch.arange(14, 17)), blank.take(torch.arange(17, 20))),
        "one class": three_ways(ones.numpy()),
        "unseen": Data(few.train, table.take(torch.arange(0)), few.test),
    }
    assert len(few.train) <= 5
    with federation(clients) as fed:
        result = federate(method("feddisk", rule=rule, **QUICK), fed, 2)
        actual = weights_of(fed)
    assert not result.summary.failures
    assert all(bool(torch.isfinite(a).all()) for a in actual.values())
    assert torch.allclose(actual["blank"], torch.ones(14), atol=1e-3) or rule == "minmax2"


def test_tables_have_a_gaussian_density(brief):
    g = torch.Generator().manual_seed(1)
    clients = {}
    for k in range(3):
        rows = Rows.of(x=torch.randn(60, 5, generator=g) + k, y=torch.randint(0, 2, (60,), generator=g))
        clients[f"c{k}"] = Data(
            rows.take(torch.arange(40)), rows.take(torch.arange(40, 50)), rows.take(torch.arange(50, 60))
        )
    task = Task(lambda: build("mlp:8", (5,), 2))
    for rule in ("llr", "dre", "odds"):
        with Simulation(clients) as fed:
            federate(FedDisk(task=task, local=SGD(), rule=rule, **QUICK), fed, 1)
            assert all(bool(torch.isfinite(a).all()) for a in weights_of(fed).values())
    with Simulation(clients) as fed, pytest.raises(Mistake, match="density=gaussian"):
        federate(FedDisk(task=task, local=SGD(), density="bernoulli", **QUICK), fed, 1)


def test_density_rounds_use_different_batch_orders():
    m, data = method("feddisk", task=mlp_task(), density_batch=4, **QUICK), skewed(2)["c0"]
    start = {"round": 0, "made": None}
    first, again, later = (
        run_step(m.learn, [Node("a", data, step="learn")], [{**start, "round": r}])[0].reply for r in (0, 0, 1)
    )
    assert same(first, again)
    assert not same(first[0], later[0])


# The form as printed, and what is recorded -----------------------------------------------------------------------------


def test_as_printed_neither_clips_nor_normalises(brief):
    """The raw odds reach the loss: their mean is recorded and is not one."""
    with federation() as fed:
        result = federate(method("feddisk", rule="odds", normalise="none", clip=False, delta=1e-6, **QUICK), fed, 1)
        raw = {p.node: p.value for p in result.rounds[0].series if p.series == "mean of the raw ratios"}
        for i, a in weights_of(fed).items():
            assert float(a.double().mean()) == pytest.approx(raw[i], rel=1e-5)
    assert max(abs(v - 1) for v in raw.values()) > 0.01
    assert not any(p.series == "share of the ratios clipped" for p in result.rounds[0].series)


def test_the_record_has_mean_share_clipped_auc_and_losses(brief):
    with federation() as fed:
        result = federate(method("feddisk", rule="odds", **QUICK), fed, 1)
    series = {p.series for p in result.rounds[0].series}
    assert series == {
        "mean of the raw ratios",
        "share of the ratios clipped",
        "AUC of the classifier",
        "effective share of the rows",
        "training loss of the density model",
        "validation loss of the density model",
    }
    shares = [
        p.value for p in result.rounds[0].series if p.series in ("AUC of the classifier", "share of the ratios clipped")
    ]
    assert all(0 <= v <= 1 for v in shares)


@pytest.mark.parametrize(("settings", "said"), [({}, 0), ({"judge_epochs": 0}, 3), ({"judge_lr": 1e6}, 3)])
def test_a_classifier_that_did_not_improve_is_reported(settings, said):
    with federation(skewed(3)) as fed:
        result = federate(method("feddisk", rule="odds", **QUICK, **settings), fed, 1)
    assert sum(n.count for n in result.summary.notices if "untrained one" in n.what) == said


def test_weights_that_are_not_finite_become_ones_with_a_notice(brief, monkeypatch):
    monkeypatch.setattr(
        "kilter.methods.feddisk.weights_by_density", lambda ratio, tau: torch.full_like(ratio, float("nan"))
    )
    with federation() as fed:
        result = federate(method("feddisk", **QUICK), fed, 1)
        assert all(bool((a == 1).all()) for a in weights_of(fed).values())
    assert any("not finite" in n.what for n in result.summary.notices)


def test_tables_on_raw_scales_are_standardised_together():
    """IID clients whose features have deviations of 1000 and 0.001: nearly every row counts, as it should."""
    g = torch.Generator().manual_seed(0)
    clients = {}
    for k in range(3):
        x = torch.randn(200, 2, generator=g) * torch.tensor([1000.0, 0.001]) + torch.tensor([5000.0, 3.0])
        rows = Rows.of(x=x, y=torch.zeros(200, dtype=torch.int64))
        clients[f"c{k}"] = Data(
            rows.take(torch.arange(160)), rows.take(torch.arange(160, 180)), rows.take(torch.arange(180, 200))
        )
    m = FedDisk(task=Task(lambda: build("linear", (2,), 2)), local=SGD(), tau=1.0, density_rounds=10, start="global")
    with Simulation(clients) as fed:
        federate(m, fed, 1)
        assert all(effective_size(a) > 0.9 * len(a) for a in weights_of(fed).values())


@pytest.mark.parametrize(
    "bad", [{"density_epochs": 0}, {"a_min": 2.0, "a_max": 1.0}, {"tau": -1.0}, {"delta": 0.6}, {"layers": 0}]
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(Mistake, match=next(iter(bad))):
        method("feddisk", **bad)
