"""The only training loop: setup, round, evaluate, record, checkpoint, stop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kilter.core import AtNodes, Method, Params, Tree
from kilter.errors import Mistake
from kilter.records.run_folder import Store, write
from kilter.runtimes.base import Runtime
from kilter.runtimes.evaluation import examine_bench, examine_variants, is_personal, mean_of, spread
from kilter.runtimes.interrupts import check
from kilter.runtimes.step_names import EVALUATE, FRAMEWORK_STEPS

Watch = Callable[[dict[str, Any]], None]
CHECKPOINT_SECONDS = 5.0  # a checkpoint is written at most this often, and at the end


@dataclass
class Result:
    """What came of a run."""

    state: Tree
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: dict[str, Any]
    model: Params | None = field(repr=False, default=None)


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
) -> Result:
    """Run a method for this many rounds, going on from the store's checkpoint if it has one.

    Evaluates every `evaluate_every` rounds and at the end; with `patience`, stops when the validation score has not improved for
    that many evaluations. `watch` sees every round's record.
    """
    if rounds < 1 or evaluate_every < 1:
        raise Mistake("A run needs at least one round, and evaluations at least one round apart.")
    fed.bind(method)
    fed.rounds = rounds
    records, progress, state = _begin(method, fed, store, watch)
    saved_at = time.monotonic()
    while progress["round"] < rounds and not progress["stopped"]:
        began = time.perf_counter()
        fed.round = fed.after(progress["round"])
        state = method.round(fed, state)
        last = fed.round >= rounds
        report: dict[str, Any] = {}
        if last or fed.round % evaluate_every == 0:
            report = evaluate(method, fed, state, full=last)
            _note_best(progress, fed.round, report)
            if patience and progress["stale"] >= patience and not last:
                progress["stopped"] = True
                report = evaluate(method, fed, state, full=True)
        check()
        progress["round"] = fed.round
        record = _record(fed, report, time.perf_counter() - began)
        progress["seconds"] += record["seconds"]
        progress["last"] = {"round": fed.round, **report} if report else progress["last"]
        records.append(record)
        if store:
            store.append(record)
            if last or progress["stopped"] or time.monotonic() - saved_at >= checkpoint_seconds:
                _save(store, fed, progress, state)
                saved_at = time.monotonic()
        if watch:
            watch(record)
    return _finish(method, fed, store, records, progress, state, name or type(method).__name__.lower())


def _begin(
    method: Method, fed: Runtime, store: Store | None, watch: Watch | None
) -> tuple[list[dict[str, Any]], dict[str, Any], Tree]:
    """Where the checkpoint left off, or the method's set-up, which is round 0 of the record."""
    found = store.load() if store else None
    if store and found:
        fed.round, saved, states = found
        fed.states, fed.role = states, saved["role"]
        return store.rewind(fed.round), saved["progress"], saved["state"]
    began = time.perf_counter()
    fed.round = 0
    state = method.setup(fed)
    check()
    record = _record(fed, {}, time.perf_counter() - began)
    progress: dict[str, Any] = {
        "round": 0,
        "best": None,
        "last": None,
        "stale": 0,
        "stopped": False,
        "seconds": record["seconds"],
    }
    if store:
        store.rewind(-1)
        store.append(record)
        _save(store, fed, progress, state)
    if watch:
        watch(record)
    return [record], progress, state


def _save(store: Store, fed: Runtime, progress: dict[str, Any], state: Tree) -> None:
    store.save(fed.round, {"progress": progress, "state": state, "role": fed.role}, fed.states, fed.changed)
    fed.changed.clear()


def evaluate(method: Method, fed: Runtime, state: Tree, full: bool) -> dict[str, Any]:
    """Every node's report, and the common test set: `global` is the global model there, or the mean of the nodes' own."""
    alone = isinstance(state, AtNodes)
    shown = state if alone else method.shared(state)
    found = seen = None
    if fed.bench is not None and not alone:
        found, seen = examine_bench(method, fed.look(method, state), fed.bench["y"], full)
    clients = dict(fed.call(EVALUATE, {"state": shown, "full": full, "seen": seen}, training=False))
    reports = list(clients.values())
    return {
        "global": found or mean_of(reports, "own_bench"),
        "global_is": "the global model" if found else "the mean over the clients' own models",
        "variants": {} if alone or fed.bench is None else examine_variants(method, state, fed.bench, full),
        "clients": clients,
        "client": {  # the model a client would use: its own where it has one
            name: spread([r[part][name] for r in reports if r[part]])
            for part in ["own_test" if is_personal(method) else "test"]
            for name in next((r[part] for r in reports if r[part]), {})
        },
        "bench": {  # the same model on the common test set: with the client's own shares of the classes, and as it is
            part: found
            for part in ("local", "common")
            if (found := spread([r[part] for r in reports if r.get(part) is not None]))
        },
        "valid": _validation(reports, "own_valid" if is_personal(method) else "valid"),
    }


def _validation(reports: list[dict[str, Any]], part: str) -> dict[str, float] | None:
    """Metrics on all validation rows together: every client counts by its rows."""
    found = [(r[part], r["n_valid"]) for r in reports if r[part]]
    n = sum(k for _, k in found)
    return {name: sum(r[name] * k for r, k in found) / n for name in found[0][0]} if found else None


def _note_best(progress: dict[str, Any], round: int, report: Mapping[str, Any]) -> None:
    """Best is chosen on validation: accuracy where there is one, else the loss."""
    valid = report["valid"]
    if not valid:
        return
    score = valid["accuracy"] if "accuracy" in valid else -valid["loss"]
    if progress["best"] is None or score > progress["best"]["score"]:
        progress["best"] = {"round": round, "score": score, **report}
        progress["stale"] = 0
    else:
        progress["stale"] += 1


def _brief(found: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if k not in ("per_class", "confusion")}


def _record(fed: Runtime, report: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    shown = {k: report.get(k) for k in ("global", "client", "bench", "valid")}
    if shown["global"]:
        shown["global"] = _brief(shown["global"])
    if report.get("variants"):
        shown["variants"] = {name: _brief(found) for name, found in report["variants"].items()}
    return {"round": fed.round, **shown, **fed.ledger.close(), "seconds": seconds}


def _fit_seconds(records: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of training over all rounds, by step: what each phase of a method costs."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record["fit_seconds"])
    return dict(total)


def _finish(
    method: Method,
    fed: Runtime,
    store: Store | None,
    records: list[dict[str, Any]],
    progress: dict[str, Any],
    state: Tree,
    name: str,
) -> Result:
    last, best = progress["last"], progress["best"]

    def headline(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if report is None:
            return None
        at = report["global"] or {}
        return {
            "round": report["round"],
            "global_accuracy": at.get("accuracy"),
            "global": at,
            "client_accuracy": report["client"].get("accuracy"),
            "client": report["client"],
            "bench": report.get("bench", {}),  # none in checkpoints of older runs
            "valid": report["valid"],
            **({"variants": report["variants"]} if report.get("variants") else {}),
        }

    top = headline(last) or {}
    summary = {
        "method": name,
        "rounds": progress["round"],
        "setup_rounds": records[0]["exchanges"],
        "seed": fed.seed,
        "clients": len(fed.ids),
        "topology": fed.topology.spec,
        "global_accuracy": top.get("global_accuracy"),
        "global_is": last["global_is"],
        "client_accuracy": top.get("client_accuracy"),
        "client_is": "each client's own model on its own test rows"
        if is_personal(method)
        else "the model a client received on its own test rows",
        "local_accuracy": top.get("bench", {}).get("local"),
        "common_accuracy": top.get("bench", {}).get("common"),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "fit_seconds": _fit_seconds(records),
        "failures": sum(len(r["failures"]) for r in records),
        "seconds": progress["seconds"],
        "workers": {name: n for name, n in fed.shared.items() if name not in FRAMEWORK_STEPS},
        "stopped_early": progress["stopped"],
        "last": top,
        "best": {"chosen_on": "validation", **(headline(best) or {})},
    }
    clients = {k: {"round": r["round"], "clients": r["clients"]} for k, r in (("last", last), ("best", best)) if r}
    model = None if isinstance(state, AtNodes) else method.model(state)
    if store:
        if model is not None:
            from safetensors.torch import save

            plain = {theirs: model[ours].contiguous() for theirs, ours in method.task.names.items() if ours in model}
            write(store.path("model.safetensors"), save(plain))
        store.finish(summary, clients)
    return Result(state, summary, records, clients, model)
