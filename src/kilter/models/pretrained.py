"""Networks of other libraries as bodies: `hf:NAME_OR_PATH` (transformers) and `timm:NAME`, each with a new linear head.

`hf:` takes the folder of a saved model, or a name of the hub that is in the local cache or can be downloaded. `timm:NAME` is the
architecture with initial weights: load others with --weights. `timm:NAME:pretrained` uses the weights that timm knows.
"""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from kilter.errors import Mistake
from kilter.models.small import Network, Shape

PREFIXES = ("hf", "timm")
CONNECT_SECONDS = 5.0


def is_pretrained_spec(name: str) -> bool:
    """Whether this names a network of another library.

    >>> is_pretrained_spec("hf:models/bert"), is_pretrained_spec("mlp:64")
    (True, False)
    """
    library, colon, rest = name.partition(":")
    return library in PREFIXES and bool(colon and rest)


def build_pretrained(name: str, shape: Shape, classes: int) -> Network:
    """The network of another library, with a head for this many classes."""
    library, _, rest = name.partition(":")
    return _from_transformers(rest, shape, classes) if library == "hf" else _from_timm(rest, shape, classes)


class TextBody(nn.Module):
    """The mean over the tokens of a text encoder. Token t of its tokenizer is t + 1 in a row, and 0 is padding (`ids=yes`)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features)"""
        known = x > 0
        states: Tensor = self.encoder(
            input_ids=(x.long() - 1).clamp(min=0), attention_mask=known.long()
        ).last_hidden_state
        weights = known.to(states.dtype).unsqueeze(-1)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


class ImageBody(nn.Module):
    """The features of an image encoder: the mean over places."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features)"""
        states: Tensor = self.encoder(pixel_values=x).last_hidden_state
        return states.mean(1) if states.dim() == 3 else states.flatten(2).mean(2)


def _from_transformers(name: str, shape: Shape, classes: int) -> Network:
    try:
        from transformers import AutoModel
        from transformers.utils import logging as messages
    except ModuleNotFoundError as error:
        raise Mistake(f"Models hf:NAME need the library {error.name}: `pip install 'kilter[transformers]'`.") from None
    path = Path(name).expanduser()
    messages.disable_progress_bar()
    messages.set_verbosity_error()  # its table of loaded weights: what matters is below
    try:
        with torch.random.fork_rng(devices=[]):
            saved = path if path.exists() else _cached(name)
            encoder, loading = AutoModel.from_pretrained(
                str(saved or name), local_files_only=saved is not None, output_loading_info=True
            )
    except Mistake:
        raise
    except Exception as error:  # the library raises many kinds, also if there is no network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Mistake(
            f"The model 'hf:{name}' cannot be loaded ({reason}): give the folder of a saved model, or go online."
        ) from None
    missing = sorted(key for key in loading.get("missing_keys", ()) if "pooler" not in key)  # the pooler is not used
    if missing:
        raise Mistake(
            f"The model 'hf:{name}' lacks {len(missing)} weights, such as {missing[0]}: save all of the encoder (save_pretrained)."
        )
    body = TextBody(encoder.float()) if len(shape) == 1 else ImageBody(encoder.float())
    return Network(body, nn.Linear(_width(name, body, shape), classes))


def _cached(name: str) -> Path | None:
    """Where the local cache has a model of the hub, if the hub cannot be reached; None: download it."""
    from huggingface_hub import try_to_load_from_cache

    if _hub_is_reachable():
        return None
    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        raise Mistake(
            f"The model 'hf:{name}' is not a folder and not in the local cache, and its hub cannot be reached: give the "
            "folder of a saved model, or go online."
        )
    return Path(config).parent


def _hub_is_reachable() -> bool:
    """Whether the library's hub can be dialled; without this check the library itself would retry for a minute."""
    from huggingface_hub.constants import ENDPOINT

    if getproxies():  # the proxy dials, and knows better
        return True
    address = urlsplit(ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _width(name: str, body: nn.Module, shape: Shape) -> int:
    """The number of features, from one sample."""
    try:
        with torch.no_grad():
            return int(body.eval()(torch.ones(1, *shape)).shape[1])
    except Exception as error:  # whatever a network raises for rows that it cannot read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Mistake(f"The model '{name}' cannot read rows of shape {tuple(shape)} ({reason}).") from None


def _from_timm(rest: str, shape: Shape, classes: int) -> Network:
    try:
        import timm
    except (
        ModuleNotFoundError,
        RuntimeError,
        OSError,
    ) as error:  # torchvision raises RuntimeError if it is for another torch
        reason = str(error).splitlines()[0][:100]
        raise Mistake(
            f"Models timm:NAME need the libraries timm and torchvision, which must fit torch {torch.__version__} ({reason}): "
            "`pip install 'kilter[timm]'`, and torchvision from where torch was installed."
        ) from None
    name, _, weights = rest.partition(":")
    if weights not in ("", "pretrained"):
        raise Mistake(f"Write timm:{name} or timm:{name}:pretrained, not 'timm:{rest}'.")
    if len(shape) != 3:
        raise Mistake(f"timm:{name} needs images, but a sample has the shape {tuple(shape)}.")
    try:
        body = timm.create_model(name, pretrained=bool(weights), num_classes=0, in_chans=shape[0])
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Mistake(f"The model 'timm:{rest}' cannot be loaded ({reason}).") from None
    return Network(body, nn.Linear(_width(name, body, shape), classes))
