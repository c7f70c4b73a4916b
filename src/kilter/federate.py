"""The only training loop: set up, train a round, evaluate, record, checkpoint, stop."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kilter.core import SERVER, AtNodes, Method, Params, Tree
from kilter.errors import Mistake
from kilter.records.model_info import ModelInfo
from kilter.records.notices import count_notices, no_valid_replies, nothing_trained
from kilter.records.run_folder import Saved, Store
from kilter.records.settings import Settings, changed_settings
from kilter.records.types import (
    Checkpoint,
    ClientReport,
    Clients,
    ClientsAt,
    Evaluated,
    Evaluation,
    ModelScores,
    Round,
    Standing,
    Summary,
)
from kilter.runtimes.base import Runtime
from kilter.runtimes.evaluation import (
    NOT_FINITE,
    EvaluationOrder,
    by_class,
    by_client,
    chosen_by,
    clear_non_finite,
    evaluate_clients,
    is_personal,
    mean_of,
    read_reports,
    save_final_models,
    score,
    score_variants,
)
from kilter.runtimes.interrupts import check
from kilter.runtimes.step_names import EVALUATE
from kilter.runtimes.target_statistics import partition_record

Watch = Callable[[Round], None]
CHECKPOINT_SECONDS = 5.0  # a checkpoint is written at most this often, and at the end


class NothingTrained(Mistake, UserWarning):
    """No reply could be used in any round: the model is the initial one. `federate` warns, a run of an experiment fails."""


@dataclass
class Result:
    """The result of a run."""

    state: Tree
    summary: Summary
    rounds: list[Round]
    clients: dict[str, ClientReport]  # at the last evaluation
    best_clients: dict[str, ClientReport] | None = None  # at the best round on validation rows
    model: Params | None = field(repr=False, default=None)
    best_model: Params | None = field(repr=False, default=None)  # at the best round, if this process ran it

    def _repr_html_(self) -> str:
        """How a notebook shows the result."""
        from kilter.records.html import result_html

        return result_html(self.summary, self.rounds)


@dataclass
class Loop:
    """A run in progress."""

    method: Method
    fed: Runtime
    evaluate_every: int
    patience: int
    store: Store | None
    experiment: Settings | None
    records: list[Round] = field(default_factory=list)
    at: Checkpoint = field(default_factory=Checkpoint)
    state: Tree = None
    best_model: Params | None = None
    best_is_new: bool = False  # not yet on disk

    @property
    def model(self) -> Params | None:
        return None if isinstance(self.state, AtNodes) or self.method.task.personal else self.method.model(self.state)

    def save_best(self) -> None:
        if self.store and self.best_is_new and self.best_model is not None:
            best, before = self.at.best, self.at.before and self.at.before.best
            rounds = best.evaluation.round if best else 0, before.evaluation.round if before else None
            self.store.save_best(self.best_model, self.method.task.names, *rounds)
        self.best_is_new = False

    def save(self) -> None:
        if self.store:
            self.save_best()
            settings = None if self.experiment is None else dict(self.experiment)
            saved = Saved(self.at, self.state, self.fed.role, settings, self.fed.states)
            self.store.save(saved, self.fed.changed)
            self.fed.changed.clear()


def federate(
    method: Method,
    fed: Runtime,
    rounds: int,
    *,
    store: Store | None = None,
    evaluate_every: int = 1,
    patience: int = 0,
    watch: Watch | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    name: str | None = None,
    experiment: Settings | None = None,
    extend: Callable[[], None] | None = None,
    info: ModelInfo | None = None,
) -> Result:
    """Run a method for this many rounds, from the store's checkpoint if it has one.

    Evaluates every `evaluate_every` rounds and at the end. With `patience`, stops when the validation score has not improved
    for that many evaluations. `watch` receives every round's record. `experiment` (plain values) is kept with the checkpoint:
    a run does not resume under other settings. With `extend` it may have more rounds than before; `extend` is called when the
    checkpoint says so. `info` says how to build the network; with it, the folder has a model card.
    """
    if rounds < 1 or evaluate_every < 1:
        raise Mistake("A run needs at least one round, and evaluations at least one round apart.")
    fed.bind(method)
    fed.rounds = rounds
    loop = Loop(method, fed, evaluate_every, patience, store, experiment)
    if not _resume(loop, extend):
        _set_up(loop, watch)
    saved_at = time.monotonic()
    while loop.at.round < rounds and not loop.at.stopped:
        record = _round(loop)
        if store:
            store.append(record)
            if record.round >= rounds or loop.at.stopped or time.monotonic() - saved_at >= checkpoint_seconds:
                loop.save()
                saved_at = time.monotonic()
        if watch:
            watch(record)
    return _finish(loop, name or type(method).__name__.lower(), info)


def _set_up(loop: Loop, watch: Watch | None) -> None:
    """The method's set-up: round 0 of the record."""
    began = time.perf_counter()
    loop.fed.round = 0
    loop.fed.ledger.include(loop.fed.opening)
    loop.state = loop.method.setup(loop.fed)
    check()
    record = _record(loop.method, loop.fed, None, time.perf_counter() - began)
    loop.at.seconds = record.seconds
    loop.records = [record]
    if loop.store:
        fed = loop.fed
        if partition := partition_record(loop.method.task, fed.label_counts(), fed.clients, fed.ids):
            loop.store.save_partition(partition)
        loop.store.rewind(-1)
        loop.store.append(record)
        loop.save()
    if watch:
        watch(record)


def _round(loop: Loop) -> Round:
    """Train one round, evaluate where it is due, and record it."""
    began = time.perf_counter()
    fed = loop.fed
    fed.begin_round(loop.at.round, loop.state, loop.model if loop.at.best else None)
    loop.state = loop.method.round(fed, loop.state)
    last = fed.round >= fed.rounds
    evaluated = _evaluate(loop, last) if last or fed.round % loop.evaluate_every == 0 else None
    check()
    loop.at.round = fed.round
    record = _record(loop.method, fed, evaluated, time.perf_counter() - began)
    loop.at.seconds += record.seconds
    loop.records.append(record)
    return record


def _evaluate(loop: Loop, last: bool) -> Evaluated:
    """Evaluate after a round, update the best round, and decide whether to stop."""
    at = loop.at
    if last:
        loop.save_best()
    at.before = Standing(at.last, at.best, at.score, at.stale) if last else None
    evaluated = evaluate(loop.method, loop.fed, loop.state, full=last)
    if _choose_best(loop.method, at, evaluated):
        loop.best_model, loop.best_is_new = loop.model, True
    if loop.patience and at.stale >= loop.patience and not last:
        at.stopped = True
        evaluated = evaluate(loop.method, loop.fed, loop.state, full=True)
    at.last = evaluated
    return evaluated


# Resuming -----------------------------------------------------------------------------------------------------------


def _resume(loop: Loop, extend: Callable[[], None] | None) -> bool:
    """Continue from the store's checkpoint, if it has one."""
    saved = loop.store.load() if loop.store else None
    if saved is None or loop.store is None:
        return False
    changed = changed_settings(saved.experiment, loop.experiment)
    longer = extend if "rounds" in changed else None
    if longer:
        changed.remove("rounds")
    if longer or (saved.at.before and loop.fed.rounds > saved.at.round):
        _check_extension(loop, saved.at)
    if changed:
        hint = "; for more rounds, use `kilter resume RUN --rounds N`" if "rounds" in changed else ""
        raise Mistake(
            f"The settings of the run in '{loop.store.folder}' were changed after it started ({', '.join(changed)}): "
            f"restore experiment.toml, or start a new run{hint}."
        )
    fed = loop.fed
    fed.round, fed.role, fed.states = saved.at.round, saved.role, saved.nodes
    loop.at, loop.state = saved.at, saved.state
    loop.records = loop.store.rewind(fed.round)
    if longer or (loop.at.before and fed.rounds > loop.at.round):
        _reopen(loop, loop.store, saved)
    if longer:
        longer()
    return True


def _check_extension(loop: Loop, at: Checkpoint) -> None:
    if loop.fed.rounds <= at.round:
        raise Mistake(f"This run already has {at.round} rounds: give --rounds a larger number.")
    if at.stopped:
        raise Mistake(f"This run stopped early at round {at.round} (patience): more rounds would change nothing.")
    if loop.method.depends_on_rounds():
        raise Mistake(
            f"The training of {type(loop.method).__name__} depends on the number of rounds, so the run cannot be extended: "
            "start a new run."
        )


def _reopen(loop: Loop, store: Store, saved: Saved) -> None:
    """Undo what the run did because it was at its end, so that it goes on like a longer run: the final evaluation."""
    store.reopen()
    at, before = loop.at, loop.at.before
    if before is not None:
        store.save(saved, (), rounds_follow=True)
        if at.best and at.best.evaluation.round == at.round:
            store.restore_best()
        at.last, at.best, at.score, at.stale, at.before = before.last, before.best, before.score, before.stale, None
        evaluated = _evaluate(loop, last=False) if at.round % loop.evaluate_every == 0 else None
        again, old = _record(loop.method, loop.fed, evaluated, 0.0), loop.records[-1]
        loop.records[-1] = replace(
            old,
            **{name: getattr(again, name) for name in EVALUATION_FIELDS},
            failures=[*(f for f in old.failures if f.step != str(EVALUATE)), *again.failures],
            notices=[*(n for n in old.notices if n.step != str(EVALUATE)), *again.notices],
        )
        store.rewrite(loop.records)
    loop.save()


EVALUATION_BYTES = ("evaluation_bytes_up", "evaluation_bytes_down")
EVALUATION_FIELDS = (*EVALUATION_BYTES, "global_metrics", "client", "by_client", "bench", "valid", "variants")


# Evaluation ---------------------------------------------------------------------------------------------------------


def evaluate(method: Method, fed: Runtime, state: Tree, full: bool) -> Evaluated:
    """Every node's report, and the common test set: the global model there, or the mean of the nodes' own models."""
    alone = isinstance(state, AtNodes)
    scores = by_classes = None
    variants: dict[str, ModelScores] = {}
    if fed.bench is not None and not alone:
        outputs = fed.look(method, state)
        if outputs is not None:
            y = fed.bench["y"]
            scores, by_classes = score(method, outputs, y, full), by_class(method, outputs, y)
        variants = score_variants(method, state, fed.bench, full)
    order = EvaluationOrder(state=state if alone else method.shared(state), full=full, seen=by_classes)
    reports = read_reports(fed.call(EVALUATE, order, training=False), fed.ledger)
    own = scores is None
    if own and (mean := mean_of(list(reports.values()))):
        scores = ModelScores(mean)
    cleared = [clear_non_finite(s.metrics) for s in (*variants.values(), *([scores] if scores else []))]
    if any(cleared):
        fed.ledger.notice(SERVER, str(EVALUATE), NOT_FINITE)
    evaluation = replace(
        evaluate_clients(method, list(reports.values())),
        round=fed.round,
        global_model="mean of personal models" if own else "global",
        scores=scores,
        variants=variants,
    )
    return Evaluated(evaluation, reports)


def _choose_best(method: Method, at: Checkpoint, evaluated: Evaluated) -> bool:
    """Compare this evaluation with the best so far, on validation rows; whether it is better."""
    valid = evaluated.evaluation.valid
    if not valid:
        return False
    metric = chosen_by(method, valid)
    value = valid[metric]
    value = -value if value is not None and method.task.direction(metric) == "lower" else value
    if value is not None and (at.score is None or value > at.score):
        at.best, at.score, at.stale = evaluated, value, 0
        return True
    at.stale += 1
    return False


def _record(method: Method, fed: Runtime, evaluated: Evaluated | None, seconds: float) -> Round:
    books = vars(fed.ledger.close())
    if evaluated is None:
        return Round(round=fed.round, seconds=seconds, **books)
    e = evaluated.evaluation
    return Round(
        round=fed.round,
        seconds=seconds,
        global_metrics=e.scores.metrics if e.scores else None,
        client=e.client,
        by_client=by_client(method, evaluated.reports),
        bench=e.bench,
        valid=e.valid,
        variants={name: scores.metrics for name, scores in e.variants.items()},
        **books,
    )


# The result ---------------------------------------------------------------------------------------------------------


def _finish(loop: Loop, name: str, info: ModelInfo | None) -> Result:
    """Write and return the result."""
    method, store, at = loop.method, loop.store, loop.at
    assert at.last is not None
    summary = _summary(loop, name, at.last.evaluation)
    if summary.outcome != "trained":
        warnings.warn(nothing_trained(loop.records), NothingTrained, stacklevel=3)
    best = ClientsAt(at.best.evaluation.round, at.best.reports) if at.best else None
    if store:
        card = save_final_models(method, loop.fed, loop.state, store, summary, at.last.reports, info)
        clients = Clients(ClientsAt(at.last.evaluation.round, at.last.reports), best)
        store.finish(summary, clients)
        if received := loop.fed.distribute(method, loop.state, store.read_best(method.task.names), card):
            store.finish(summary := replace(summary, received=received), clients)
    of_best = best.clients if best else None
    return Result(loop.state, summary, loop.records, at.last.reports, of_best, loop.model, loop.best_model)


def _summary(loop: Loop, name: str, last: Evaluation) -> Summary:
    method, fed, at, records = loop.method, loop.fed, loop.at, loop.records
    fit_seconds: Counter[str] = Counter()
    for record in records:
        fit_seconds.update(record.fit_seconds)
    never = [] if isinstance(loop.state, AtNodes) else method.never_happened(loop.state)
    if not method.pools and (fed.robust or method.server):  # a study may set them for all of its methods
        never = [*never, "the method does not pool models, so a robust rule or a server optimiser had no effect"]
    names = {**(last.scores.metrics if last.scores else {}), **last.client, **(last.valid or {})}
    return Summary(
        method=name,
        rounds=at.round,
        seed=fed.seed,
        clients=len(fed.ids),
        topology=fed.topology.spec,
        outcome="no valid replies" if no_valid_replies(records) else "trained",
        setup_rounds=records[0].exchanges,
        global_accuracy=last.global_accuracy,
        global_model=last.global_model,
        client_accuracy=last.client_accuracy,
        client_model="personal" if is_personal(method) else "received",
        local_accuracy=last.bench.get("local"),
        common_accuracy=last.bench.get("common"),
        bytes_up=sum(r.bytes_up for r in records),
        bytes_down=sum(r.bytes_down for r in records),
        fit_seconds=dict(fit_seconds),
        failures=sum(len(r.failures) for r in records),
        notices=count_notices(records, never),
        seconds=at.seconds,
        workers={step: n for step, n in fed.shared.items() if not step.startswith(":")},
        device=", ".join(map(str, fed.devices)),
        precision=fed.precision,
        stack_width=fed.stack_width,
        stopped_early=at.stopped,
        last=last,
        best=at.best.evaluation if at.best else None,
        chosen_by=chosen_by(method, at.best.evaluation.valid if at.best else last.valid),
        directions={metric: method.task.direction(metric) for metric in names},
    )
