"""Try a user's model and method on one batch before a run starts, so that a mistake is one sentence and not a traceback."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from inspect import isgenerator
from pathlib import Path

import torch
from torch import Tensor

from kilter.core import SERVER, Data, Fit, Method, Rows, Tree
from kilter.errors import Mistake
from kilter.fast import switch
from kilter.plugins import error_text, is_file_spec
from kilter.runtimes.base import Runtime
from kilter.runtimes.step_names import StepName
from kilter.runtimes.step_runner import Done, resolve
from kilter.tasks import Task
from kilter.tasks.kinds import CLASSIFICATION
from kilter.train import Plan, lengths, run_one
from kilter.trees import leaves

NODES = 3  # clients of a trial
ROWS = 32  # rows of each


def try_run(
    method: Method, spec: str, model: str, clients: Mapping[str, Data], public: Rows | None, classes: int
) -> None:
    """Try whatever could fail: a user's model or method, unusual outputs, a batch of one row. `spec` names the method."""
    check_tokens(method.task, model, clients)
    by_place = model.split(":")[0] in ("unet", "causal-transformer")  # outputs for every pixel or token
    unusual = by_place or method.task.kind not in CLASSIFICATION
    if is_file_spec(model) or unusual or smallest_batch(clients, method.local)[1] == 1:
        try_model(method.task, model, clients, method.local, classes)
    if is_file_spec(spec):
        try_method(method, spec, clients, public)


def check_tokens(task: Task, model: str, clients: Mapping[str, Data]) -> None:
    """Refuse rows that are no tokens for a network of ours that looks up a vector for each."""
    name = model.partition(":")[0]
    vectors = getattr(getattr(getattr(task.module, "body", None), "tokens", None), "weight", None)
    if is_file_spec(model) or not isinstance(vectors, Tensor):
        return
    x = next(iter(clients.values())).train.tables["x"]
    largest = int(x.max())
    if x.min() < 0 or not torch.equal(x, x.round()):
        raise Mistake(
            f"The model {name} reads tokens, and these rows are not whole numbers from 0: choose another --model."
        )
    if largest >= len(vectors):
        options = "lstm:64" if name == "lstm" else f"{name}:64:2:4"
        raise Mistake(
            f"The model {name} knows {len(vectors)} tokens, and the rows have token {largest}: write how many there are (the width "
            f"of --prepare, or those of the tokenizer), as in --model {options}:{max(largest + 1, 2048)}."
        )


def smallest_batch(clients: Mapping[str, Data], plan: Plan) -> tuple[str, int]:
    """The client with the smallest batch, and how many rows that has (at most ROWS)."""
    sizes = {name: min(lengths(len(data.train), plan.batch)) for name, data in clients.items()}
    name = min(sizes, key=lambda k: sizes[k])
    return name, min(sizes[name], ROWS)


def try_model(task: Task, spec: str, clients: Mapping[str, Data], plan: Plan, classes: int) -> None:
    """Compute the outputs and the loss of the smallest batch that training will use."""
    name, rows = smallest_batch(clients, plan)
    batch = clients[name].train.batch(torch.arange(rows))
    params = task.init(0)
    try:
        with switch.plain(True), torch.random.fork_rng(devices=[]):
            outputs: object = task.outputs(params, batch["x"], training=True)
    except Exception as error:
        if rows == 1 and "more than 1 value per channel" in str(error):
            raise Mistake(
                f"BatchNorm cannot train on a batch of one row, such as one of client '{name}': use a larger --batch, "
                "fewer clients, or a model without BatchNorm."
            ) from error
        shape = tuple(batch["x"].shape)
        raise Mistake(
            f"The model {spec} fails on a batch of shape {shape} (rows, then one sample's shape): {_why(error, spec)}."
        ) from error
    if not isinstance(outputs, Tensor):
        raise Mistake(f"The model {spec} returns a {type(outputs).__name__}: its forward must return one tensor.")
    if task.kind not in CLASSIFICATION:
        _try_loss(task, spec, outputs, batch["y"])
    elif outputs.dim() != 2 or len(outputs) != rows or outputs.shape[1] < classes:
        raise Mistake(
            f"The model {spec} returns outputs of shape {tuple(outputs.shape)} for {rows} rows of {classes} classes: "
            f"it must return ({rows}, {classes})."
        )


SUITED = {"segmentation": ", such as --model unet", "next-token": ", such as --model causal-transformer"}


def _try_loss(task: Task, spec: str, outputs: Tensor, y: Tensor) -> None:
    """Whether the task's loss accepts these outputs."""
    try:
        losses = task.rows_loss(outputs, y)
        fits = losses.shape == y.shape[:1]
    except (RuntimeError, IndexError, ValueError):
        fits = False
    if not fits:
        raise Mistake(
            f"The model {spec} returns outputs of shape {tuple(outputs.shape)}, which the task {task.kind} cannot use "
            f"with targets of shape {tuple(y.shape)}: choose another model{SUITED.get(task.kind, '')}."
        )


def try_method(method: Method, spec: str, clients: Mapping[str, Data], public: Rows | None) -> None:
    """Run the set-up, one round and one prediction at a few clients with one batch each."""
    small = {
        name: Data(*(_few(rows) for rows in (data.train, data.valid, data.test))) for name, data in clients.items()
    }
    few = {name: small[name] for name in list(small)[:NODES]}
    trial = Trial(few, "full" if "everyone" in method.needs else "star", _few(public) if public is not None else None)
    trial.bind(method)
    try:
        with switch.plain(True), torch.random.fork_rng(devices=[]):
            state = method.setup(trial)
            trial.round = 1
            following = method.round(trial, state)
            if following is None and state is not None:
                raise Mistake(f"`round` of the method {spec} returns nothing: return the next state.")
            _predict(method, trial, following)
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(f"The method {spec} fails on one batch: {_why(error, spec)}.") from error


def _few(rows: Rows) -> Rows:
    return rows.take(torch.arange(min(len(rows), ROWS)))


def _predict(method: Method, trial: Trial, state: Tree) -> None:
    for name, data in trial.clients.items():
        x = data.train["x"]
        node = trial.node(name, StepName("personal"), trial.round, trial.states.get(name, {}))
        method.predict(state, x)
        method.personal(node, method.shared(state), x)


def _why(error: Exception, spec: str) -> str:
    return error_text(error, Path(spec.rpartition(":")[0]).expanduser().resolve())


class Trial(Runtime):
    """A runtime that stops at the first error and trains one batch for every fit."""

    def __init__(self, clients: Mapping[str, Data], topology: str, public: Rows | None) -> None:
        super().__init__(tuple(clients), 0, topology, None, public)
        self.clients = dict(clients)
        self.rounds = 2

    def bind(self, method: Method) -> None:
        super().bind(method)
        self._method = method

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        step = resolve(self._method, name)
        done = {}
        for node_id, message in messages.items():
            node = self.node(node_id, name, self.round, self.states.setdefault(node_id, {}))
            done[node_id] = Done(self._reply(name.step, step(node, message)), notes=node.notes)
        return done

    def hub(self, step: Callable[..., Tree], *messages: Tree) -> Tree:
        node = self.node(self.aggregator, StepName(step.__name__), self.round, self.states.setdefault(SERVER, {}))
        return self._reply(step.__name__, step(node, *messages))

    def _reply(self, step: str, outcome: Tree) -> Tree:
        """What a step returns, after training the fits it yields."""
        reply = self._train(step, outcome) if isgenerator(outcome) else outcome
        if any(isinstance(leaf, Fit) for _, leaf in leaves(reply)):
            raise Mistake(f"The step `{step}` returns a Fit that was not performed: write `yield node.fit(...)`.")
        return reply

    def _train(self, step: str, running: Generator[object, Tree, Tree]) -> Tree:
        answer = None
        while True:
            try:
                request = running.send(answer)
            except StopIteration as end:
                return end.value
            if not isinstance(request, Fit):
                kind = type(request).__name__
                raise Mistake(f"The step `{step}` yields a {kind}: it may only yield `node.fit(...)`.")
            answer = self._fit(step, request)

    def _fit(self, step: str, fit: Fit) -> Tree:
        fit = replace(fit, rows=_few(fit.rows), plan=replace(fit.plan, epochs=1, batch=0))
        loss: object = fit.loss({k: v.clone() for k, v in fit.params.items()}, fit.rows.batch(), fit.ctx)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise Mistake(
                f"The loss that the step `{step}` trains returns {shape}: it must return one number, such as the mean."
            )
        return run_one(fit).params
