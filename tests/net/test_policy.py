"""A site allows nothing that its policy does not: methods, settings, models, rows, disclosures, resources."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sites import AUTOMATIC, ask, make_site, make_terms, order

from kilter.core import DISCLOSURES, Data, Rows
from kilter.errors import Mistake
from kilter.methods import methods
from kilter.net.data_description import DataDescription
from kilter.net.limits import StepTimeout, StepTimer
from kilter.net.policy import Bounds, PolicyViolation, SitePolicy, narrowed
from kilter.net.terms import Terms
from kilter.runtimes.step_names import StepName

PAPERS = ("feddisk", "slfed", "fedpdc", "fedsbme", "fedep")
BASELINES = ("fedavg", "fedprox", "scaffold", "fedbn", "fedrep", "moon", "solo")


@pytest.mark.parametrize("name", [*PAPERS, *BASELINES])
def test_the_five_papers_and_the_baselines_run_under_the_built_in_policy(name: str, tmp_path: Path) -> None:
    site = make_site(tmp_path)
    graph = "full" if "everyone" in methods()[name].needs else "star"
    site.agree(make_terms(site, graph, method=name))
    assert type(site.method) is methods()[name]


@pytest.mark.parametrize("name", ["pooled", "feddisk-oracle"])
def test_a_site_without_a_policy_file_never_sends_rows(name: str, tmp_path: Path) -> None:
    """Finding 1: a site without --allow-methods obeyed a server that asked for its rows."""
    site = make_site(tmp_path)
    with pytest.raises(PolicyViolation, match="only allows"):
        site.agree(make_terms(site, method=name))
    site.policy = narrowed(site.policy, [name], [])  # --allow-methods alone does not allow rows
    with pytest.raises(PolicyViolation, match="raw rows"):
        site.agree(make_terms(site, method=name))
    site.policy = replace(site.policy, sends=frozenset(DISCLOSURES))  # only the policy file does
    site.agree(make_terms(site, method=name))


def test_a_running_site_cannot_be_switched_to_other_terms(tmp_path: Path) -> None:
    """Finding 1: a reconnect could switch a running `join` to another method."""
    site = make_site(tmp_path)
    site.agree(make_terms(site))
    for changed in ({"method": "fedprox"}, {"seed": 4}, {"local": {"lr": 0.2}}, {"valid": 0.3}, {"rounds": 4}):
        with pytest.raises(Mistake, match="changed the terms"):
            site.agree(make_terms(site, **changed))
    site.agree(replace(make_terms(site), session="2" * 32))  # a new session of the same run
    assert site.experiment.method == "fedavg"


@pytest.mark.parametrize("valid", [0.9999, 1.0, -3, math.nan, 0.51, True, "0.1", None])
def test_no_server_chooses_how_many_rows_train(valid: object, tmp_path: Path) -> None:
    """Finding 2: valid=0.9999 left a single row to train on, and the update showed it."""
    site = make_site(tmp_path)
    terms = make_terms(site)
    with pytest.raises(PolicyViolation, match="valid"):
        site.agree(replace(terms, experiment={**terms.experiment, "valid": valid}))


def test_too_few_rows_do_not_train(tmp_path: Path) -> None:
    site = make_site(tmp_path, rows=18)
    with pytest.raises(PolicyViolation, match="would train on 14 rows"):
        site.agree(make_terms(site))
    few = replace(AUTOMATIC, rows=0)
    site.policy = few
    site.agree(make_terms(site))
    reply, _ = ask(site, order("train"), site.method.task.init(0))
    assert "A fit on 14 rows" in reply.error


def test_fedmix_with_single_rows_is_refused(tmp_path: Path) -> None:
    """Finding 2: mash=1 sends every row."""
    site = make_site(tmp_path)
    with pytest.raises(PolicyViolation, match="mash"):
        site.agree(make_terms(site, method="fedmix", settings={"mash": 1}))
    site.policy = replace(AUTOMATIC, methods={"fedmix": {}})
    with pytest.raises(PolicyViolation, match="raw rows"):
        site.agree(make_terms(site, method="fedmix", settings={"mash": 1}))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"local": {"epochs": 10**9}}, "epochs"),
        ({"local": {"lr": 1e30}}, "lr"),
        ({"local": {"batch": 1}}, "batch"),
        ({"model": "mlp:40000:40000"}, "weights"),
        ({"rounds": 10**6}, "rounds"),
        ({"method": "fedrep", "settings": {"head_epochs": 10**9}}, "epochs"),
        ({"method": "fedem", "settings": {"components": 10**9}}, "components"),
    ],
)
def test_a_server_cannot_exhaust_a_site(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Finding 10: epochs=10**9 took 3.3 GB in 20 s; a model of 1.6 billion weights was built."""
    site = make_site(tmp_path)
    with pytest.raises(Mistake, match=says):
        site.agree(make_terms(site, **changed))


def test_the_plan_of_every_fit_is_checked_not_only_the_terms(tmp_path: Path) -> None:
    """A learning rate that grows by the round is within the policy at first."""
    site = make_site(tmp_path)
    site.agree(make_terms(site, local={"decay": 1.0}))
    object.__setattr__(site.method.local, "decay", 100.0)
    w = site.method.task.init(0)
    assert ask(site, order("train", 1), w)[0].error == ""
    assert "lr" in ask(site, order("train", 3), w)[0].error


def test_a_step_that_takes_too_long_ends() -> None:
    def endless() -> None:
        with StepTimer(0.2):
            while True:
                pass

    with pytest.raises(StepTimeout):
        endless()
    with StepTimer(30.0):
        pass


def test_evaluation_results_leave_only_with_enough_rows_and_if_allowed(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    site.agree(make_terms(site))
    message = {"state": site.method.task.init(0), "full": True, "seen": {"recalls": [1.0] + [0.0] * 9, "accuracy": 0.1}}
    _, report = ask(site, order(":evaluate"), message)
    assert report["test"]
    assert report["local"] is None  # a server that sends chosen recalls would learn the share of a class
    assert report["common"] == 0.1
    site.policy = replace(AUTOMATIC, evaluation_rows=10**6)
    _, report = ask(site, order(":evaluate", 1, 2), message)
    assert report["test"] is None
    assert report["valid"] is None
    site.policy = replace(AUTOMATIC, evaluation=frozenset({"local"}))
    _, report = ask(site, order(":evaluate", 1, 3), message)
    assert report["local"] is not None
    assert report["test"] is None


def test_metrics_of_single_classes_leave_only_if_the_policy_names_them_and_with_enough_rows() -> None:
    def rows(cats: int, dogs: int) -> Rows:
        return Rows.of(x=torch.zeros(cats + dogs, 1), y=torch.tensor([0] * cats + [1] * dogs))

    metrics = {"accuracy": 0.5, "recall:cat": 0.25, "recall:dog": 0.75}
    report = {"n_test": 90, "n_valid": 20, "test": metrics, "valid": metrics, "own_bench": metrics}
    step, data = StepName.parse(":evaluate"), Data(rows(9, 9), rows(10, 10), rows(87, 3))
    none = {"accuracy": 0.5, "recall:cat": None, "recall:dog": None}
    assert AUTOMATIC.filter_report(step, report, data) == {**report, "test": none, "valid": none, "own_bench": none}
    named = replace(AUTOMATIC, evaluation=AUTOMATIC.evaluation | {"by_class"}, evaluation_rows=5)
    assert named.filter_report(step, report, data) == {**report, "test": {**metrics, "recall:dog": None}}


def test_sealing_can_be_required(tmp_path: Path) -> None:
    site = make_site(tmp_path, replace(AUTOMATIC, sealed=True))
    with pytest.raises(PolicyViolation, match="sealed"):
        site.agree(make_terms(site))
    site.agree(make_terms(site, "full"))


def test_a_file_of_the_server_runs_only_if_the_site_named_its_own_copy(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    terms = make_terms(site)
    with pytest.raises(PolicyViolation, match=r"--trust evil\.py"):
        site.agree(replace(terms, experiment={**terms.experiment, "method": "/tmp/evil.py:Evil"}))


def test_a_policy_file_states_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        'approval = "policy"\nsealed = true\nrows = 100\nsends = ["model", "counts"]\nlr = { at_most = 0.1 }\n'
        "[methods]\nfedavg = {}\nfedprox = { mu = { at_least = 0.001, at_most = 1 } }\n"
    )
    policy = SitePolicy.read(path)
    assert policy.methods == {"fedavg": {}, "fedprox": {"mu": Bounds(0.001, 1.0)}}
    assert (policy.approval, policy.sealed, policy.rows, policy.lr) == ("policy", True, 100, Bounds(at_most=0.1))
    assert policy.epochs == SitePolicy().epochs  # what the file leaves out has the built-in value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method = []", "did you mean 'methods'"),
        ('methods = ["fedavgg"]', "fedavg"),
        ('sends = ["row"]', "rows"),
        ("lr = 0.1", "range"),
        ("lr = { most = 0.1 }", "range"),
        ('approval = "nobody"', "person"),
        ("sealed = 1", "true or false"),
        ("rows = -1", "number"),
        ('rows = "all"', "number"),
        ("methods = 3", "list of names"),
        ('models = ["gpt17"]', "Unknown"),
    ],
)
def test_a_policy_file_with_a_mistake_is_refused_in_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(Mistake, match=says):
        SitePolicy.read(tmp_path / "site.toml")


def test_the_shape_of_the_data_is_the_sites_own(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    terms = make_terms(site)
    with pytest.raises(Mistake, match="shape"):
        site.agree(replace(terms, description=DataDescription((3, 32, 32), terms.description.classes)))


def test_terms_with_anything_unknown_in_them_are_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    head = make_terms(site).head()
    for key, value in (
        ("experiment", {"data": "/etc/passwd"}),
        ("experiment", []),
        ("experiment", {"settings": {"x": {"y": {"z": {"w": {}}}}}}),
        ("ids", ["server"]),
        ("ids", "abc"),
        ("sealed", "no"),
        ("run", "../../x"),
        ("data", None),
    ):
        with pytest.raises(Mistake):
            Terms.parse({**head, key: value})
    assert Terms.parse(head).digest == make_terms(site).digest


def test_torch_stays_at_one_thread_at_a_site(tmp_path: Path) -> None:
    make_site(tmp_path)
    assert torch.get_num_threads() == 1


def test_a_run_starts_no_more_processes_than_the_policy_allows() -> None:
    code = """
import os, subprocess, sys
from kilter.net.limits import limit_processes
from kilter.net.policy import PolicyViolation
limit_processes(1)
subprocess.run([sys.executable, "-c", ""], check=True)
for start in (lambda: subprocess.run(["true"]), os.fork, lambda: os.system("true")):
    try:
        start()
    except PolicyViolation as e:
        print(e)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["This site's policy allows 1 child processes, and the run started more."] * 3
