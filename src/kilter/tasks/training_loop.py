"""A training loop of your own in place of an optimiser: `--optimiser file.py:train`, a function, or a Lightning module's class.

    def train(job):
        optimiser = torch.optim.SGD(job.parameters(), lr=job.plan.lr, momentum=0.9)
        for batch in job.batches():
            optimiser.zero_grad()
            job.loss(batch).backward()
            optimiser.step()

`job.loss` is the loss of the method, with everything that it adds, so the loop works with every method. Batches come in the
derived order, and torch is seeded for the fit: the same numbers anywhere. A Lightning module trains with its own loss.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import isclass
from pathlib import Path

import torch
from torch import Tensor

from kilter.core import Batch, Fit, Params
from kilter.errors import Mistake
from kilter.options import option
from kilter.params import BUFFER
from kilter.plugins import error_text, load_object
from kilter.train import Fitted, Plan, batches, trainable


@dataclass
class TrainingJob:
    """What a training loop of your own works on."""

    plan: Plan  # learning rate, epochs, batch size
    params: Params  # by name; train them in place
    _fit: Fit
    _trained: list[str]
    _losses: list[float] = field(default_factory=list)

    def parameters(self) -> list[Tensor]:
        """The tensors to train, for an optimiser."""
        return [self.params[name] for name in self._trained]

    def batches(self) -> Iterator[Batch]:
        """The batches of all epochs: `x`, `y` and what the method adds."""
        for at in batches(self._fit):
            yield self._fit.rows.batch(at)

    def loss(self, batch: Batch) -> Tensor:
        """The method's loss of a batch."""
        value = self._fit.loss(self.params, batch, self._fit.ctx)
        self._losses.append(float(value.detach()))
        return value

    def record(self, losses: Sequence[float]) -> None:
        """Note the losses of steps that were not computed with `loss`."""
        self._losses += losses

    def fitted(self) -> Fitted:
        """The result of the loop."""
        steps = len(self._losses)
        trained = {name: value.detach().contiguous() for name, value in self.params.items()}
        return Fitted(trained, sum(self._losses) / max(steps, 1), steps)


@dataclass(frozen=True, kw_only=True)
class TrainingLoop(Plan):
    """A function or a Lightning module in a file. Fits train one by one."""

    name: str = option("", "The training loop: file.py:function, or file.py:LightningModule.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name:
            find_loop(self.name)

    @property
    def alone(self) -> bool:
        return True

    def begin(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        raise AssertionError("a training loop of your own is no optimiser")

    def update(self, weights: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], t: int) -> None:
        raise AssertionError("a training loop of your own is no optimiser")

    def run(self, fit: Fit) -> Fitted:
        """Perform a fit."""
        loop = find_loop(self.name)
        names = trainable(fit)
        params = {k: v.clone() for k, v in fit.params.items()}
        for name in names:
            params[name].requires_grad_()
        job = TrainingJob(self, params, fit, names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fit.seed)
            try:
                _train_lightning(loop, job, fit) if isclass(loop) else loop(job)
            except Mistake:
                raise
            except Exception as error:
                path = Path(self.name.rpartition(":")[0]).expanduser().resolve()
                raise Mistake(f"The training loop {self.name} fails: {error_text(error, path)}.") from error
        return job.fitted()


def find_loop(spec: str) -> Callable[..., object]:
    """The function or class that this names."""
    loop = load_object(spec)
    lightning = hasattr(loop, "training_step") and hasattr(loop, "configure_optimizers")
    if not callable(loop) or isclass(loop) > lightning:
        raise Mistake(f"{spec} is neither a function train(job) nor the class of a Lightning module.")
    return loop


def _train_lightning(kind: Callable[..., object], job: TrainingJob, fit: Fit) -> None:
    """Train with Lightning's Trainer, and take over the weights."""
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError:
        raise Mistake("A Lightning module needs the library lightning: `pip install 'kilter[lightning]'`.") from None
    if fit.ctx is not None:
        raise Mistake(
            "A Lightning module trains with its own loss, and this method adds to it: write a function train(job) instead."
        )
    module = kind()
    if not isinstance(module, LightningModule):
        raise Mistake(f"{job.plan.name} is not a Lightning module.")  # type: ignore[attr-defined]
    own = {name: job.params[_ours(name, job.params)] for name in module.state_dict() if _ours(name, job.params)}
    module.load_state_dict({name: value.detach() for name, value in own.items()}, strict=False)
    losses: list[float] = []

    class Losses(Callback):  # type: ignore[misc]
        """Records the loss of every step."""

        def on_train_batch_end(self, _: object, __: object, outputs: dict[str, Tensor], *___: object) -> None:
            losses.append(float(outputs["loss"]))

    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about workers and logging, which do not apply
            trainer = Trainer(
                callbacks=[Losses()],
                max_epochs=1,
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, _Recorded(job))
    finally:
        log.setLevel(level)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if ours := _ours(name, job.params):
                job.params[ours].copy_(value)
    job.record(losses)


def _ours(name: str, params: Params) -> str:
    """The name in Params of a module's parameter or buffer; empty if it is not part of the model."""
    return name if name in params else BUFFER + name if BUFFER + name in params else ""


class _Recorded:
    """The batches of a job as (x, y), in the way of a DataLoader."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._job.batches():
            yield batch["x"], batch["y"]

    def __len__(self) -> int:
        return self._job.plan.steps(len(self._job._fit.rows))
