"""Export a model as ONNX, TorchScript, an exported program or a folder for the Hugging Face hub, and check the result."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kilter.data.preparation import FILE as PREPARATION
from kilter.errors import Mistake
from kilter.inference.model_folder import SavedModel
from kilter.records.model_info import CARD
from kilter.tasks.kinds import prediction

FORMATS = ("onnx", "torchscript", "exported-program", "huggingface")
TOLERANCE = 1e-5  # largest difference of outputs, relative to the largest output
SUFFIX = {
    "onnx": "model.onnx",
    "torchscript": "model.pt",
    "exported-program": "model.pt2",
    "huggingface": "config.json",
}
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was checked."""

    path: Path
    rows: int
    difference: float  # the largest of outputs, relative to the largest output


def export(model: SavedModel, to: str, folder: Path, rows: Tensor) -> Exported:
    """Write the model in this format, load it again, and compare its outputs on these rows."""
    module = model.module()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SUFFIX[to]
    sample = rows[:2] if len(rows) > 1 else rows
    writers: dict[str, Callable[[nn.Module, Tensor, Path, SavedModel], Run]] = {
        "onnx": _onnx,
        "torchscript": _torchscript,
        "exported-program": _program,
        "huggingface": _hub_folder,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracers, about themselves
        run = writers[to](module, sample, path, model)
    for name in (CARD, PREPARATION, "schema.toml"):
        if (model.folder / name).exists() and not (folder / name).exists():
            shutil.copy(model.folder / name, folder / name)
    return Exported(path, len(rows), verify(module, run, rows, model.task.kind))


@torch.no_grad()
def verify(module: nn.Module, run: Run, rows: Tensor, kind: str) -> float:
    """The largest difference between the exported model and ours; a Mistake if it is too large or a prediction differs."""
    largest = difference = 0.0
    for part in rows.split(500):
        ours, theirs = module(part), run(part)
        if not (ours.isfinite().all() and theirs.isfinite().all()):
            raise Mistake(
                "Outputs for some rows are not finite numbers, and cannot be compared: the export was written, but do not use it."
            )
        largest = max(largest, float(ours.abs().max()))
        difference = max(difference, float((ours - theirs).abs().max()))
        numbers = kind in ("regression", "survival")
        if not numbers and not torch.equal(prediction(kind, ours), prediction(kind, theirs)):
            raise Mistake("The exported model predicts another class for some rows: it was written, but do not use it.")
    relative = difference / max(largest, 1e-12)
    if relative > TOLERANCE:
        raise Mistake(f"The exported model differs by {relative:.1e} from ours: it was written, but do not use it.")
    return relative


def _onnx(module: nn.Module, sample: Tensor, path: Path, model: SavedModel) -> Run:
    try:
        import onnx  # noqa: F401 - torch needs it
        import onnxruntime
    except ModuleNotFoundError as e:
        raise Mistake(f"ONNX needs the library {e.name}: `pip install 'kilter[onnx]'`.") from None
    dynamic = {"x": {0: "rows"}, "outputs": {0: "rows"}}
    torch.onnx.export(
        module, (sample,), path, input_names=["x"], output_names=["outputs"], dynamic_axes=dynamic, dynamo=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _torchscript(module: nn.Module, sample: Tensor, path: Path, model: SavedModel) -> Run:
    torch.jit.trace(module, sample).save(str(path))
    return torch.jit.load(path)


def _program(module: nn.Module, sample: Tensor, path: Path, model: SavedModel) -> Run:
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(module, (sample,), dynamic_shapes={"x": {0: rows}})
    torch.export.save(program, path)
    return torch.export.load(path).module()


def _hub_folder(module: nn.Module, sample: Tensor, path: Path, model: SavedModel) -> Run:
    """config.json, model.safetensors and README.md, as the hub expects them."""
    facts, experiment = model.info.facts, model.info.experiment
    config = {
        "library_name": "kilter",
        "architecture": experiment["model"],
        "task": model.task.kind,
        "shape": list(model.shape),
        "classes": model.classes,
        "mean": facts.get("mean"),
        "std": facts.get("std"),
        "units": model.task.units,
        "versions": model.info.versions,
    }
    path.write_text(json.dumps(config, indent=2) + "\n")
    network: nn.Module = module.network  # type: ignore[assignment]
    state = {
        name: value.clone().contiguous() for name, value in network.state_dict().items()
    }  # tied weights: one copy each
    file = path.with_name("model.safetensors")
    save_file(state, file, metadata={"format": "pt"})
    again = copy.deepcopy(module)
    for value in again.network.state_dict().values():  # type: ignore[union-attr]
        value.zero_()
    again.network.load_state_dict(load_file(file))  # type: ignore[union-attr]
    return again
