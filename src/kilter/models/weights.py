"""Pre-trained weights from a local file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kilter.errors import Mistake

log = logging.getLogger("kilter")

NEW = ("head.", "body.projection.")  # may keep initial values: other classes, or not in the file


def load_weights(module: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a local file into the module, by name. A head that does not fit keeps its initial values (logged).

    Weights of torchvision's ResNets can be loaded: `fc.` becomes `head.`, everything else goes below `body.`.
    """
    own = module.state_dict()
    stored = {_rename(name, own): tensor for name, tensor in _read(Path(path)).items()}
    fresh = [n for n in own if n.startswith(NEW) and (n not in stored or stored[n].shape != own[n].shape)]
    used = {name: tensor for name, tensor in stored.items() if name not in fresh}
    extra = [name for name in used if name not in own]
    missing = [n for n in own if n not in stored and n not in fresh and not n.endswith("num_batches_tracked")]
    if extra or missing:
        where = "not in the network" if extra else "not in the file"
        raise Mistake(
            f"{path} is for another network: {_some(extra or missing)} {where}. Choose the model it was saved from."
        )
    for name, tensor in used.items():
        if tensor.shape != own[name].shape:
            raise Mistake(
                f"{path} is for another network: {name} is {_size(tensor)} in the file and {_size(own[name])} in the"
                " network. Choose the model and the image size and channels it was saved from."
            )
        if not tensor.isfinite().all():
            raise Mistake(f"{path} is damaged: {name} has NaN or infinite values. Download the file again.")
    if not used:
        raise Mistake(f"{path} has no weights for this network. Choose the model it was saved from.")
    module.load_state_dict(used, strict=False)
    if fresh:
        log.warning("%s: %s not loaded (absent, or another number of classes), newly initialised", path, _some(fresh))
    return module


def _rename(name: str, own: Mapping[str, Tensor]) -> str:
    """Our name for a tensor in a file, which may be a plain name, a buffer of a flat dict ("~"), or a name of torchvision."""
    name = name.removeprefix("~")
    if name in own or name.startswith(("body.", "head.")):
        return name
    return name.replace("fc.", "head.", 1) if name.startswith("fc.") else f"body.{name}"


def _read(path: Path) -> dict[str, Tensor]:
    """The named tensors of a .safetensors, .pt or .pth file. Nothing in the file is executed."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise Mistake(f"{path} is not a file of weights: give a .safetensors, .pt or .pth file.")
    if not path.is_file():
        raise Mistake(f"There is no file {path}: check the path.")
    try:
        stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # damaged files can make the readers raise anything
        raise Mistake(
            f"{path} is damaged or contains more than tensors: download it again, or save only module.state_dict()."
        ) from error
    if isinstance(stored, dict):
        stored = next((stored[key] for key in ("state_dict", "model") if isinstance(stored.get(key), dict)), stored)
    if not isinstance(stored, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in stored.items()):
        raise Mistake(f"{path} does not contain named tensors: save module.state_dict().")
    return stored


def _some(names: list[str]) -> str:
    """At most the first three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
