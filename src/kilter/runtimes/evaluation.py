"""How models are evaluated: at every node on its own rows, and on the common test set. Nothing is trained or tuned here."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from kilter.core import AtNodes, Data, Method, Node, Params, Rows, Tree
from kilter.metrics import Direction, confusion, local_accuracy, per_class, recalls
from kilter.records.codec import Unreadable, read_report
from kilter.records.model_card import data_lines, model_card
from kilter.records.model_info import BEST, CARD, FROZEN, LAST, ModelInfo
from kilter.records.model_info import FILE as MODEL_INFO
from kilter.records.run_folder import Store, personal_file, read_partition, write
from kilter.records.types import ClientReport, Evaluation, Metrics, ModelScores, Spread, Summary
from kilter.records.wire import Malformed
from kilter.runtimes.ledger import Ledger
from kilter.runtimes.personal_layers import own_model, own_outputs
from kilter.runtimes.step_names import StepName
from kilter.tasks.task import predict_rows

SAMPLE = 2000  # rows of the common test set that evaluate personal models between rounds
PART = 1000  # rows of the common test set that one process predicts at a time
NOT_FINITE = "a metric was not a finite number"
MOST_CURVES = 100  # clients whose metric is recorded in every evaluated round
BATCH_BYTES = 16 << 20  # bytes of several nodes' rows that are predicted together


LONGEST_CARD = 1_000_000  # characters of a model card
POOL = "~pool"  # where a peer keeps its own state of `pool`


class Nodes(Protocol):
    """A runtime, as far as the models of its nodes matter here."""

    clients: dict[str, Data]
    states: dict[str, dict[str, Tree]]

    def node(self, name: str, step: StepName, round: int, state: dict[str, Tree]) -> Node: ...


class ByClass(TypedDict):
    """A classifier on the common test set: its accuracy, and that of each class (None for a class without rows)."""

    accuracy: float
    recalls: list[float | None]


class EvaluationOrder(TypedDict):
    """What nodes are sent to evaluate."""

    state: Tree  # the shared state, or AtNodes where every node has its own
    full: bool  # on all rows of the common test set, not a sample
    seen: ByClass | None  # how the global model does there, where there is one


def is_personal(method: Method) -> bool:
    """Whether nodes have models of their own."""
    kind = type(method)
    if method.task.personal:
        return True
    return kind.personal is not Method.personal or kind.personal_model is not Method.personal_model


@dataclass(frozen=True, eq=False)
class EvaluationRequest:
    """A request to measure a shared model on one node's rows. `examine` yields it; requests of many nodes run together."""

    method: Method
    state: Tree
    rows: Rows


def evaluate_requests(requests: Sequence[EvaluationRequest]) -> list[Metrics | None]:
    """The metrics of each request. The grouping depends on the requests alone, never on the number of processes."""
    metrics: list[Metrics | None] = []
    for group in _groups(requests):
        first = group[0]
        outputs = _predict(first, group)
        if outputs is None:
            metrics += [None] * len(group)
            continue
        y, sizes = torch.cat([request.rows["y"] for request in group]), [len(request.rows) for request in group]
        metrics += first.method.task.measure_each(outputs, y, sizes)
    return metrics


def _predict(first: EvaluationRequest, group: list[EvaluationRequest]) -> Tensor | None:
    if len(group) == 1:
        return predict_rows(lambda x: first.method.predict(first.state, x), first.rows)
    return first.method.predict(first.state, torch.cat([request.rows["x"] for request in group]))


def _groups(requests: Sequence[EvaluationRequest]) -> Iterator[list[EvaluationRequest]]:
    """Consecutive requests about one state: at most BATCH_BYTES of rows, or a single request."""
    group: list[EvaluationRequest] = []
    held = 0
    for request in requests:
        size = request.rows.gathered_bytes("x")
        if group and (request.state is not group[0].state or held + size > BATCH_BYTES):
            yield group
            group, held = [], 0
        group.append(request)
        held += size
    if group:
        yield group


def examine(
    method: Method, node: Node, state: Tree, full: bool, alone: bool, common_scores: ByClass | None = None
) -> Generator[EvaluationRequest, Metrics | None, dict[str, Tree]]:
    """A node's report on the models it holds, with the fields of `ClientReport`: metrics only.

    Under peers (`alone`) the state is the node's own. `common_scores` says how the global model does on the common test set, so
    that not every node must predict it again.
    """
    task = method.task
    parts = {"test": node.data.test, "valid": node.data.valid}
    report: dict[str, Tree] = {"n_test": len(node.data.test), "n_valid": len(node.data.valid)}

    def measured(outputs: Tensor | None, rows: Rows) -> Metrics | None:
        return None if outputs is None else task.measure(outputs, rows["y"])

    for name, rows in parts.items():
        report[name] = None
        if len(rows) and alone:  # one by one: whether nodes share one state object depends on how states travelled
            report[name] = measured(predict_rows(partial(method.predict, state), rows), rows)
        elif len(rows):
            report[name] = yield EvaluationRequest(method, state, rows)
        if is_personal(method):
            own = predict_rows(partial(own_outputs, method, node, state), rows) if len(rows) else None
            report[f"own_{name}"] = measured(own, rows)
    if is_personal(method) or alone:
        common = sample_rows(node.bench, full)
        outputs = None
        if common is not None and len(common):
            personal = partial(own_outputs, method, node, state)
            outputs = predict_rows(personal if is_personal(method) else partial(method.predict, state), common)
        report["own_bench"] = None if common is None else measured(outputs, common)
        common_scores = None if common is None or outputs is None else by_class(method, outputs, common["y"])
    if common_scores and len(node.data.train):
        counts = torch.bincount(node.data.train["y"], minlength=len(common_scores["recalls"])).tolist()
        report |= {"local": local_accuracy(common_scores["recalls"], counts), "common": common_scores["accuracy"]}
    if replaced := [name for name, part in report.items() if isinstance(part, dict) and clear_non_finite(part)]:
        node.notice(f"{NOT_FINITE} ({', '.join(replaced)})")
    return report


def clear_non_finite(metrics: dict[str, Tree]) -> bool:
    """Replace NaN and infinity by None; whether there were any."""
    names = [name for name, value in metrics.items() if value is not None and not math.isfinite(value)]
    metrics.update(dict.fromkeys(names))
    return bool(names)


def by_class(method: Method, outputs: Tensor, y: Tensor) -> ByClass | None:
    """A classifier's accuracy on these rows, and on those of each class; None for other tasks."""
    if method.task.metrics is not None:
        return None
    counts = confusion(outputs, y)
    return {"accuracy": float(counts.diagonal().sum().double() / counts.sum()), "recalls": recalls(counts)}


def parts(rows: Rows) -> int:
    """Into how many parts the common test set is divided. It never depends on who predicts them."""
    return max(1, -(-len(rows) // PART))


def predict_part(method: Method, state: Tree, rows: Rows, part: int) -> Tensor | None:
    """The global model's outputs for one part of the common test set."""
    chosen = rows.take(torch.arange(part * PART, min((part + 1) * PART, len(rows))))
    return predict_rows(partial(method.predict, state), chosen)


def score_variants(method: Method, state: Tree, rows: Rows, full: bool) -> dict[str, ModelScores]:
    """The method's other results on the common test set, between rounds on a sample of its rows."""
    variants = method.variants(state)
    some = (sample_rows(rows, full) or rows) if variants else rows
    outputs = {name: predict_rows(predict, some) for name, predict in variants.items()}
    return {name: score(method, out, some["y"], full) for name, out in outputs.items() if out is not None}


def score(method: Method, outputs: Tensor, y: Tensor, full: bool) -> ModelScores:
    """The task's metrics of these outputs; in full evaluations of a classifier also those of each class."""
    metrics: Metrics = dict(method.task.measure(outputs, y))
    if not full or method.task.metrics is not None:
        return ModelScores(metrics)
    counts = confusion(outputs, y)
    return ModelScores(metrics, per_class(counts), counts.tolist())


def sample_rows(rows: Rows | None, full: bool) -> Rows | None:
    """All rows, or SAMPLE of them, always the same."""
    if rows is None or full or len(rows) <= SAMPLE:
        return rows
    return rows.take(torch.linspace(0, len(rows) - 1, SAMPLE).long())


def read_reports(replies: Mapping[str, Tree], ledger: Ledger) -> dict[str, ClientReport]:
    """Clients' replies as reports; a reply that is none goes on record as refused."""
    reports: dict[str, ClientReport] = {}
    for node, reply in replies.items():
        try:
            reports[node] = read_report(reply)
        except Unreadable as e:
            ledger.failed(node, ":evaluate", f"its report cannot be read: {e}", "unreadable")
    return reports


def chosen_by(method: Method, valid: Metrics | None) -> str:
    """The metric that chooses the best round: the task's main metric, or the loss where that is not measured."""
    main = method.task.main
    return main if valid is None or main in valid else "loss"


def spread(values: Sequence[float | None], better: Direction = "higher") -> Spread | None:
    """A metric over clients, with the mean of the worst tenth (at least one client); None without finite values.

    >>> spread([0.5, 0.7, 0.9]).worst_decile, spread([0.5, 0.7, 0.9], better="lower").worst_decile
    (0.5, 0.9)
    """
    v = np.sort(np.asarray([x for x in values if x is not None and math.isfinite(x)], dtype=float))
    if not len(v):
        return None
    tenth = max(1, len(v) // 10)
    worst = v[:tenth] if better == "higher" else v[-tenth:]
    numbers = [float(x) for x in (v.mean(), v.std(), v[0], v[-1], worst.mean())]
    return Spread(*numbers) if all(map(math.isfinite, numbers)) else None


def mean_of(reports: Sequence[ClientReport]) -> Metrics | None:
    """The plain mean over nodes of every metric of their own models on the common test set."""
    metrics = [r.own_bench for r in reports if r.own_bench]
    if not metrics:
        return None
    columns: Mapping[str, list[float]] = {
        name: [value for m in metrics if (value := m.get(name)) is not None] for name in metrics[0]
    }
    return {name: float(np.mean(column)) if column else None for name, column in columns.items()}


def evaluate_clients(method: Method, reports: Sequence[ClientReport]) -> Evaluation:
    """The part of an evaluation that is about the clients: the model each would use, its own where it has one."""
    tests = [r.own_test if is_personal(method) else r.test for r in reports]
    scored = [metrics for metrics in tests if metrics]
    client = {
        name: over
        for name in (scored[0] if scored else {})
        if (over := spread([metrics.get(name) for metrics in scored], method.task.direction(name)))
    }
    both = {"local": spread([r.local for r in reports]), "common": spread([r.common for r in reports])}
    bench = {part: over for part, over in both.items() if over}
    return Evaluation(0, "global", None, client, bench, _validation(reports, is_personal(method)))


def by_client(method: Method, reports: Mapping[str, ClientReport]) -> dict[str, float]:
    """The main metric of the model that each client would use, on its own test rows; nothing if there are many clients."""
    if len(reports) > MOST_CURVES:
        return {}
    metrics = {name: (r.own_test if is_personal(method) else r.test) or {} for name, r in reports.items()}
    return {name: value for name, each in metrics.items() if (value := each.get(method.task.main)) is not None}


def _validation(reports: Sequence[ClientReport], personal: bool) -> Metrics | None:
    """Metrics on all validation rows together: every client counts by its rows."""
    parts = [(metrics, r.n_valid) for r in reports if (metrics := r.own_valid if personal else r.valid)]
    if not parts:
        return None
    valid: Metrics = {}
    for name in parts[0][0]:
        known = [(value, k) for metrics, k in parts if (value := metrics.get(name)) is not None]
        valid[name] = sum(value * k for value, k in known) / sum(k for _, k in known) if known else None
    clear_non_finite(valid)
    return valid


# The models at the end of a run -------------------------------------------------------------------------------------


def save_final_models(
    method: Method,
    fed: Nodes,
    state: Tree,
    store: Store,
    summary: Summary,
    reports: dict[str, ClientReport],
    info: ModelInfo | None,
) -> str:
    """Write the models and the model card to the run folder; the text of the card."""
    names = method.task.names
    model = None if isinstance(state, AtNodes) or method.task.personal else method.model(state)
    if method.task.frozen:
        store.save_model(method.task.frozen_weights(), {name: name for name in method.task.frozen}, FROZEN)
    if model is not None:
        store.save_model(model, names)
    for client, own in personal_models(method, fed, state, summary.rounds).items():
        store.save_personal(client, own, names)
    if info is None:
        return ""
    card = model_card(info, summary, reports, data_lines(read_partition(store.folder)))
    write(store.path(CARD), card)
    write(store.path(MODEL_INFO), info.text())
    return card


def personal_models(method: Method, fed: Nodes, state: Tree, round: int) -> dict[str, Params]:
    """The own model of every node in this process, where it is one network: between peers, of every node."""
    alone = isinstance(state, AtNodes)
    models: dict[str, Params] = {}
    if not alone and not is_personal(method):
        return models
    shared = None if alone else method.shared(state)
    for name in fed.clients:
        node = fed.node(name, StepName("personal"), round, fed.states.get(name, {}))
        if alone and POOL not in node.state:
            continue
        mine = node.state[POOL] if alone else shared
        own = own_model(method, node, mine) if is_personal(method) else method.model(mine)
        if own is not None:
            models[name] = own
    return models


def received_models(
    method: Method, node: Node, message: Tree
) -> tuple[dict[str, tuple[Params, Mapping[str, str]]], str]:
    """The models that a site receives at the end: by file, with their names in the module; and the model card."""
    if not isinstance(message, dict) or set(message) != {"state", "best", "card"}:
        raise Malformed("the final models are not what was expected")
    card, best, state = message["card"], message["best"], message["state"]
    if not isinstance(card, str) or len(card) > LONGEST_CARD:
        raise Malformed("the model card is no text")
    alone, task = isinstance(state, AtNodes), method.task
    mine = node.state.get(POOL) if alone else state
    last = None if (mine is None and alone) or task.personal else method.model(mine)
    own = own_model(method, node, mine) if is_personal(method) else last if alone else None
    models: dict[str, tuple[Params, Mapping[str, str]]] = {}
    for file, model in ((LAST, None if alone else last), (BEST, best), (personal_file(node.id), own)):
        if model is not None:
            _check_model(model, task.init_whole(0))
            models[file] = model, task.names
    if task.frozen:
        models[FROZEN] = task.frozen_weights(), {name: name for name in task.frozen}
    return models, card


def _check_model(model: Params, expected: Params) -> None:
    """Refuse what is not a model of this task."""
    if not isinstance(model, dict) or set(model) != set(expected):
        raise Malformed("the final model has other parameters than the network")
    for name, value in expected.items():
        if model[name].shape != value.shape or model[name].dtype != value.dtype:
            raise Malformed(f"the final model has another shape or type at {name}")
