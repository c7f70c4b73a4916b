"""A model from a folder: of a run, or of a site that took part in one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kilter.core import Params, Rows
from kilter.data.preparation import FILE as PREPARATION
from kilter.data.preparation import Preparation
from kilter.errors import Mistake, unknown
from kilter.experiment import Experiment
from kilter.records import checksums
from kilter.records.model_info import BEST, FROZEN, LAST, PERSONAL, ModelInfo
from kilter.records.run_folder import personal_file
from kilter.tasks import Task
from kilter.tasks.task import evaluation_batch, predict_rows
from kilter.train import Plan

WHICH = ("best", "last")
NUMBERS = 2**18  # of the rows in a batch of predictions


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A model with everything that is needed to use it."""

    folder: Path
    info: ModelInfo
    task: Task
    plan: Plan  # how clients trained
    params: Params
    preparation: Preparation | None  # of a table
    which: str  # best, last or the name of a client

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a prepared row."""
        shape = self.info.facts["shape"]
        return tuple(shape) if isinstance(shape, list | tuple) else ()

    @property
    def classes(self) -> list[str]:
        return self.info.classes

    def outputs(self, x: Tensor) -> Tensor:
        """The network's outputs for prepared rows."""
        size = max(evaluation_batch(x), NUMBERS // max(x[:1].numel(), 1))  # small rows need few calls
        if x.dtype != torch.uint8:
            return self.task.predict(self.params, x, size)
        outputs = predict_rows(lambda part: self.task.predict(self.params, part), Rows.of(x=x))
        assert outputs is not None
        return outputs

    def module(self) -> nn.Module:
        """A module from prepared rows to outputs, images standardised and numbers in their units."""
        return WholeModel(self.task, self.params).eval()


class WholeModel(nn.Module):
    """A network with what the task does before and after it."""

    def __init__(self, task: Task, params: Params) -> None:
        super().__init__()
        self.network = task.load(params)
        mean, std = task.facts.get("mean"), task.facts.get("std")
        colour = isinstance(mean, tuple | list) and isinstance(std, tuple | list)
        self.register_buffer("mean", torch.tensor(mean).reshape(1, -1, 1, 1) if colour else torch.zeros(()))
        self.register_buffer("std", torch.tensor(std).reshape(1, -1, 1, 1) if colour else torch.ones(()))
        self.mean: Tensor
        self.std: Tensor
        self.standardise, self.units = colour, task.units

    def forward(self, x: Tensor) -> Tensor:
        """Outputs for rows x."""
        if self.standardise:
            x = (x - self.mean) / self.std
        outputs: Tensor = self.network(x)
        return outputs if self.units is None else outputs * self.units[1] + self.units[0]


def load_model(folder: str | Path, which: str = "", client: str = "", weights: str = "") -> SavedModel:
    """The model of a folder: the best (default where there is one), the last, or a client's own."""
    folder = Path(folder)
    info = ModelInfo.read(folder)
    task, plan = build(info, weights, folder)
    file, name = _choose(folder, which, client)
    data = (folder / file).read_bytes()
    checksums.verify(folder, file, data)
    preparation = Preparation.load(folder) if (folder / PREPARATION).exists() else None
    return SavedModel(folder, info, task, plan, task.restore(folder / file), preparation, name)


def build(info: ModelInfo, weights: str, folder: Path) -> tuple[Task, Plan]:
    """The task that a model was trained for, and how clients trained. Frozen weights are those in the folder."""
    plain = {key: value for key, value in info.experiment.items() if key not in ("method", "personal", "weights")}
    if weights:
        plain["weights"] = weights
    facts: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in info.facts.items()
    }
    method = Experiment.of(plain).make(**facts, names=tuple(info.classes))
    if method.task.frozen and not weights:
        if not (folder / FROZEN).exists():
            raise Mistake(f"'{folder}' has no {FROZEN}: give the pre-trained weights of the run (--weights).")
        method.task.set_frozen(load_file(folder / FROZEN))
    return method.task, method.local


def _choose(folder: Path, which: str, client: str) -> tuple[str, str]:
    """The file of a model, and what to call it."""
    if which and which not in WHICH:
        raise unknown("model", which, WHICH)
    if client:
        own = {unquote(path.stem): path for path in (folder / PERSONAL).glob("*.safetensors")}
        if client not in own:
            if not own:
                raise Mistake(f"'{folder}' holds no models of clients: leave out --client.")
            raise unknown("client with a model", client, own)
        return personal_file(client), client
    there = [name for name, file in (("best", BEST), ("last", LAST)) if (folder / file).exists()]
    if which in there or (not which and there):
        name = which or there[0]
        return (BEST if name == "best" else LAST), name
    personal = sorted(unquote(path.stem) for path in (folder / PERSONAL).glob("*.safetensors"))
    if personal and not which:
        if len(personal) == 1:
            return personal_file(personal[0]), personal[0]
        raise Mistake(f"'{folder}' holds only clients' own models: choose one with --client, such as {personal[0]}.")
    raise Mistake(f"'{folder}' holds no {which or 'saved'} model: the method may have none.")
