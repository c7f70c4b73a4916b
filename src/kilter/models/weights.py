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

NEW = ("head.", "body.projection.")  # may keep their fresh values: other classes, or not in the file


def load_weights(module: nn.Module, path: str | Path) -> nn.Module:
    """Put a local file's weights into the module, by name; a head that does not fit stays fresh, and a note is logged.

    torchvision's ResNets fit by one rule: `fc.` is our `head.`, anything else is below `body.`.
    """
    own = module.state_dict()
    found = {_rename(name, own): tensor for name, tensor in _read(Path(path)).items()}
    fresh = [n for n in own if n.startswith(NEW) and (n not in found or found[n].shape != own[n].shape)]
    taken = {name: tensor for name, tensor in found.items() if name not in fresh}
    extra = [name for name in taken if name not in own]
    missing = [n for n in own if n not in found and n not in fresh and not n.endswith("num_batches_tracked")]
    if extra or missing:
        where = "not in the network" if extra else "not in the file"
        raise Mistake(
            f"{path} is for another network: {_some(extra or missing)} {where}. Choose the model it was saved from."
        )
    for name, tensor in taken.items():
        if tensor.shape != own[name].shape:
            raise Mistake(
                f"{path} is for another network: {name} is {_size(tensor)} in the file and {_size(own[name])} in the"
                " network. Choose the model and the image size and channels it was saved from."
            )
        if not tensor.isfinite().all():
            raise Mistake(f"{path} is damaged: {name} is not finite everywhere. Get the file again.")
    if not taken:
        raise Mistake(f"{path} holds no weights for this network. Choose the model it was saved from.")
    module.load_state_dict(taken, strict=False)
    if fresh:
        log.warning("%s: %s not loaded (absent, or another number of classes), newly initialised", path, _some(fresh))
    return module


def _rename(name: str, own: Mapping[str, Tensor]) -> str:
    """Our name of a tensor in a file: as it is, a buffer of a flat dict ("~"), or torchvision's."""
    name = name.removeprefix("~")
    if name in own or name.startswith(("body.", "head.")):
        return name
    return name.replace("fc.", "head.", 1) if name.startswith("fc.") else f"body.{name}"


def _read(path: Path) -> dict[str, Tensor]:
    """The named tensors of a .safetensors or .pt/.pth file; nothing in the file is ever executed."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise Mistake(f"{path} is not a file of weights: give a .safetensors, .pt or .pth file.")
    if not path.is_file():
        raise Mistake(f"There is no file {path}: check the path.")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make the readers raise anything
        raise Mistake(
            f"{path} is damaged or holds more than tensors: get it again, or save module.state_dict() alone."
        ) from error
    if isinstance(found, dict):
        found = next((found[key] for key in ("state_dict", "model") if isinstance(found.get(key), dict)), found)
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise Mistake(f"{path} does not hold named tensors: save module.state_dict().")
    return found


def _some(names: list[str]) -> str:
    """Names, the first three at most."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"
