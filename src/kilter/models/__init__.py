"""The networks of the papers, by name.

Every network here has two parts, `body` and `head`, with `forward(x) = head(body(x))`. The head is the last linear layer. The body
computes its inputs: features, or in `simple-cnn` and `resnet18:bn:256` the projection, MOON's z. Names of parameters
therefore start with "body." or "head.". Your own network needs these parts only for methods that split the network.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from torch import nn

from kilter.errors import Mistake, unknown
from kilter.models.inputs import EmbeddedNetwork, Input, takes_names, with_names
from kilter.models.pretrained import build_pretrained, is_pretrained_spec
from kilter.models.resnet import resnet18, resnet50
from kilter.models.sequence import causal_transformer, lstm, transformer
from kilter.models.small import Network, Shape, bench_cnn, cnn, lenet, linear, mlp, simple_cnn, temporal_cnn
from kilter.models.unet import unet
from kilter.models.weights import load_weights
from kilter.plugins import is_file_spec, load_object

__all__ = ["MODELS", "Network", "Shape", "build", "default_model", "load_weights"]

TASK_MODELS = {"next-token": "causal-transformer", "segmentation": "unet"}  # whatever the shape of the rows
LARGE = 64  # pixels; images from this size on get a larger network by default


def build(name: str, shape: Shape, classes: int, inputs: Sequence[Input] = ()) -> nn.Module:
    """Build a network from `name:option:option`, or with a user's class or function `path/to/file.py:Net`.

    `inputs` are the parts of a row by name, for categories that are embedded and for networks that take inputs by name.

    >>> build("mlp:64", (1, 28, 28), 10).head
    Linear(in_features=64, out_features=10, bias=True)
    """
    if len(shape) not in (1, 3) or min(shape) < 1 or classes < 1:
        raise Mistake(
            f"No network for samples of shape {tuple(shape)} and {classes} classes:"
            " give (channels, height, width) or (features,), and at least one class."
        )
    if is_pretrained_spec(name):
        return build_pretrained(name, shape, classes)
    embedded = any(i.values for i in inputs)
    inner = (sum(i.embedded_size for i in inputs),) if embedded else shape
    if is_file_spec(name):
        own = _from_file(name, inner, classes)
        if takes_names(own):
            return with_names(own, name, inputs)
        return EmbeddedNetwork(inputs, own) if embedded else own
    if embedded:
        return EmbeddedNetwork(inputs, build(name, inner, classes))
    name, *options = (default_model(shape) if name == "auto" else name).split(":")
    if name not in BUILDERS:
        raise unknown("model", name, BUILDERS)
    return BUILDERS[name](shape, classes, *_parse(name, options))


def default_model(shape: Shape, task: str = "", tokens: bool = False) -> str:
    """The model for rows of this shape: mlp for tables, resnet18 for images from 64 pixels, cnn for smaller ones.

    Samples of shape (channels, time, 1) are time series: temporal-cnn. With `tokens`, rows are words in order.

    >>> default_model((13,)), default_model((1, 28, 28)), default_model((3, 224, 224)), default_model((2, 24, 1))
    ('mlp', 'cnn', 'resnet18', 'temporal-cnn')
    >>> default_model((3, 64, 64), task="segmentation"), default_model((12,), tokens=True)
    ('unet', 'transformer')
    """
    if task in TASK_MODELS:
        return TASK_MODELS[task]
    if len(shape) == 1:
        return "transformer" if tokens else "mlp"
    if shape[2] == 1:
        return "temporal-cnn"
    return "resnet18" if min(shape[1:]) >= LARGE else "cnn"


def _options(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(BUILDERS[name], eval_str=True).parameters.values())[2:]


def _parse(name: str, options: list[str]) -> list[str | int]:
    """Parse the options after the name, by the annotated types of the builder."""
    known = _options(name)
    if len(options) > len(known):
        takes = "one option" if len(known) == 1 else f"{len(known) or 'no'} options"
        raise Mistake(f"Model '{name}' takes {takes}, not {len(options)}: write {_usage(name)}.")
    values: list[str | int] = []
    for text, option in zip(options, known, strict=False):
        if choices := get_args(option.annotation):
            if text not in choices:
                raise unknown(f"{option.name} of model {name}", text, choices)
            values.append(text)
        elif text.isascii() and text.isdecimal() and int(text) > 0:
            values.append(int(text))
        else:
            raise Mistake(f"Model '{name}': {option.name} must be a whole number above 0, not '{text}'.")
    return values


def _usage(name: str) -> str:
    """How to write the model with all its options: `resnet18:norm:project`."""
    return ":".join([name, *(option.name for option in _options(name))])


def _from_file(spec: str, shape: Shape, classes: int) -> nn.Module:
    """Call the user's class or function with `shape` and `classes`, if it takes them."""
    make = load_object(spec)
    if not callable(make) or isinstance(make, nn.Module):
        raise Mistake(f"{spec} is not a class or function: name one that creates the network.")
    parameters = inspect.signature(make).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    arguments = {key: value for key, value in (("shape", shape), ("classes", classes)) if key in named}
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if extra := [p for p in needed if p not in arguments]:
        raise Mistake(
            f"{spec} requires {', '.join(extra)}: only `shape` and `classes` are passed, so other parameters need defaults."
        )
    net = make(**arguments)
    if not isinstance(net, nn.Module):
        raise Mistake(f"{spec} returned a {type(net).__name__}: it must return a torch.nn.Module.")
    return net


BUILDERS: Mapping[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "bench-cnn": bench_cnn,
    "lenet": lenet,
    "temporal-cnn": temporal_cnn,
    "simple-cnn": simple_cnn,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "unet": unet,
    "lstm": lstm,
    "transformer": transformer,
    "causal-transformer": causal_transformer,
}


def _describe(name: str) -> str:
    """The description of a model: the first line of its builder, and its options with defaults."""
    line = (BUILDERS[name].__doc__ or "").strip().removesuffix(".")
    options = [f"{o.name} {'|'.join(get_args(o.annotation)) or o.default or 'none'}" for o in _options(name)]
    return f"{line}. Options: {_usage(name)} ({', '.join(options)})." if options else f"{line}."


MODELS: Mapping[str, str] = {name: _describe(name) for name in BUILDERS}
