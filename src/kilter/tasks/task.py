"""A Task: any nn.Module with a loss and metrics, as pure functions of a flat dict of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kilter.core import Batch, Params, Rows
from kilter.errors import Mistake
from kilter.fast import placement, switch
from kilter.fast.memory_layout import channels_last, pool_before_relu
from kilter.fast.single import Quick
from kilter.metrics import CLASSIFICATION, Direction, Measured, Metric, direction, measure_each
from kilter.params import BUFFER, count, weights
from kilter.seeds import derive
from kilter.tasks.augment import mixed_losses, parse_augmentation
from kilter.tasks.losses import row_cross_entropy

EVAL_BATCH = 250  # rows in one evaluation batch
LARGE_ROW = 2**14  # numbers in a row, from which on fewer rows are evaluated at once
GATHERED = 2**28  # bytes of rows that are gathered at once to evaluate a model


def evaluation_batch(x: Tensor) -> int:
    """How many rows of this table are evaluated at once."""
    return max(1, min(EVAL_BATCH, EVAL_BATCH * LARGE_ROW // max(x[:1].numel(), 1)))


def predict_rows(predict: Callable[[Tensor], Tensor | None], rows: Rows) -> Tensor | None:
    """`predict(rows["x"])`. Rows that are too large together are gathered piece by piece; no batch is cut in two."""
    if rows.gathered_bytes("x") <= GATHERED:
        return predict(rows["x"])
    size = evaluation_batch(rows.tables["x"])
    piece = max(1, GATHERED // (4 * rows.tables["x"][:1].numel() * size)) * size
    outputs = [predict(rows.take(at)["x"]) for at in torch.arange(len(rows)).split(piece)]
    known = [part for part in outputs if part is not None]
    return torch.cat(known) if len(known) == len(outputs) else None


class Task:
    """A network, its loss and its metrics.

    `module` is an nn.Module, whose weights are the initial model, or a function that creates one, with new weights for each
    seed. `loss(outputs, y)` returns one loss for each row. `metrics` maps names to `f(outputs, y) -> float` (default: the metrics
    of a classifier); `more` are added to the default ones. `main` is the metric that chooses the best round. `mean` and `std`
    standardise the channels of images before the network. `units`, a mean and a deviation, turn outputs into the target's units:
    outputs * deviation + mean. `augment` names augmentations of training batches: flip, crop, colour, mixup.

    Frozen parameters (`requires_grad_(False)`) are constants of the task. They are not part of a model, so they are neither
    sent nor stored with it. `personal` are patterns of layers that stay at a node (`--personal`).

    >>> task = Task(lambda: nn.Linear(2, 3))
    >>> sorted(task.init(seed=0))
    ['bias', 'weight']
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor] = row_cross_entropy,
        metrics: Mapping[str, Metric] | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        *,
        more: Mapping[str, Metric] | None = None,
        main: str = "",
        units: tuple[float, float] | None = None,
        kind: str = "",
        personal: Sequence[str] = (),
        augment: str = "",
    ) -> None:
        self._make = module if not isinstance(module, nn.Module) else None
        net = copy.deepcopy(module) if isinstance(module, nn.Module) else self._fresh(0)
        self._train, self._eval = copy.deepcopy(net).train(), net.eval()
        self._buffers: dict[torch.device, Params] = {}
        self._train_fast = pool_before_relu(copy.deepcopy(net)).train()
        self._init: dict[int, Params] = {}  # the initial model of the last seed
        self.rows_loss = loss
        self._augmentations, self._mixes = parse_augmentation(augment)
        self.metrics = metrics
        self.more = dict(more or {})
        self.main = main or ("accuracy" if metrics is None or "accuracy" in metrics else "loss")
        self.units = units
        self.facts: Mapping[str, object] = {}  # of the rows it was built for, where an experiment built it
        self.kind = kind or ("multi-class" if metrics is None else "custom")
        # Names in the module -> names in Params
        self.names = {name: name for name, p in net.named_parameters() if p.requires_grad}
        self.frozen = tuple(name for name, p in net.named_parameters() if not p.requires_grad)
        self.names |= {name: BUFFER + name for name, _ in net.named_buffers() if name in net.state_dict()}
        self.personal = self._matching(personal)
        shape = (1, -1, 1, 1)
        self._shift = None if mean is None else torch.tensor(mean).reshape(shape)
        self._spread = None if std is None else torch.tensor(std).reshape(shape)

    def _fresh(self, seed: int) -> nn.Module:
        assert self._make is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "init"))
            return self._make()

    @property
    def module(self) -> nn.Module:
        """The network as a module, to inspect its structure."""
        return self._eval

    def _matching(self, patterns: Sequence[str]) -> frozenset[str]:
        """Names in Params of the layers that match one of these patterns."""
        matching = frozenset(ours for name, ours in self.names.items() if any(fnmatch(name, p) for p in patterns))
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in self.names):
                some = ", ".join(list(self.names)[:4])
                raise Mistake(f"No layer of the network matches '{pattern}' (it has {some}, ...): see --personal.")
        if matching and len(matching) == len(self.names):
            raise Mistake("Every layer would stay at its node, so nothing would be shared: use the method solo.")
        return matching

    def frozen_weights(self) -> Params:
        """The frozen parameters by their names in the module."""
        return {name: p.detach() for name, p in self._eval.named_parameters() if name in self.frozen}

    def frozen_digest(self) -> str:
        """Tells one set of frozen parameters from another; empty if there are none."""
        if not self.frozen:
            return ""
        digest = blake2b(digest_size=16)
        for name, value in sorted(self.frozen_weights().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def set_frozen(self, values: Mapping[str, Tensor]) -> None:
        """Use these frozen parameters, by their names in the module."""
        if missing := set(self.frozen) - set(values):
            raise Mistake(f"The frozen weights have no {min(missing)}: they belong to another network.")
        for net in (self._train, self._train_fast, self._eval):
            net.load_state_dict({name: values[name] for name in self.frozen}, strict=False)
        self._buffers.clear()

    def init(self, seed: int) -> Params:
        """The initial model: the weights of the module, or new ones from this seed. Without what stays at nodes."""
        return {k: v for k, v in self.init_whole(seed).items() if k not in self.personal}

    def init_whole(self, seed: int) -> Params:
        """The initial model with the layers that stay at nodes."""
        if seed not in self._init:
            net = self._train if self._make is None else self._fresh(seed)
            self._init = {seed: {self.names[k]: v.detach() for k, v in net.state_dict().items() if k in self.names}}
        return {k: v.clone() for k, v in self._init[seed].items()}

    def load(self, params: Params) -> nn.Module:
        """A module with these parameters, to save or export."""
        net = copy.deepcopy(self._eval)
        net.load_state_dict({k: params[ours] for k, ours in self.names.items()}, strict=False)
        return net

    def named(self, *kinds: type[nn.Module]) -> frozenset[str]:
        """Names of the parameters and buffers of layers of these types, e.g. `task.named(nn.BatchNorm2d)`."""
        return frozenset(
            self.names[full]
            for path, layer in self._eval.named_modules()
            if isinstance(layer, kinds)
            for name in layer.state_dict()
            if (full := f"{path}.{name}" if path else name) in self.names
        )

    def part(self, prefix: str) -> frozenset[str]:
        """Names of the parameters and buffers of one submodule, e.g. `task.part("head")`."""
        names = frozenset(ours for name, ours in self.names.items() if name.startswith(prefix + "."))
        if not names:
            raise Mistake(
                f"This method needs a network with a submodule '{prefix}': give your module one of that name."
            )
        return names

    def head_shape(self) -> tuple[int, int]:
        """(classes, features) of the linear layer `head`."""
        head = self.part("head")
        rows, columns = next(v.shape for k, v in self.init(0).items() if k in head and v.dim() == 2)
        return rows, columns

    def outputs(self, params: Params, x: Tensor, training: bool = False) -> Tensor:
        """The outputs of the network. With `training`, BatchNorm updates the buffers in `params` in place."""
        net = self._network(training)
        out: Tensor = functional_call(
            net,
            {name: params[ours] for name, ours in self.names.items()} | self._constants(x.device),
            (self.standard(x),),
        )
        return self.in_units(out)

    def in_units(self, out: Tensor) -> Tensor:
        """A network's outputs in the units of the target."""
        return out if self.units is None else out * self.units[1] + self.units[0]

    def _network(self, training: bool) -> nn.Module:
        return (self._train_fast if switch.enabled() else self._train) if training else self._eval

    def _constants(self, device: torch.device) -> Params:
        """What is not part of the model, on this device: buffers with `persistent=False`, and frozen parameters."""
        if device not in self._buffers:
            fixed = {**dict(self._eval.named_buffers()), **self.frozen_weights()}
            self._buffers[device] = {name: b.to(device) for name, b in fixed.items() if name not in self.names}
        return self._buffers[device]

    def features(self, params: Params, x: Tensor, training: bool = False) -> Tensor:
        """The outputs of the submodule `body`, which are the inputs of `head`."""
        return self._part(self._network(training), "body", params, self.standard(x))

    def head(self, params: Params, features: Tensor) -> Tensor:
        """The outputs of the submodule `head` for these features."""
        return self.in_units(self._part(self._network(False), "head", params, features))

    def _part(self, net: nn.Module, part: str, params: Params, x: Tensor) -> Tensor:
        if not hasattr(net, part):
            self.part(part)  # raises a Mistake that names the missing part
        names = {name: ours for name, ours in self.names.items() if name.startswith(part + ".")}
        own = {name.removeprefix(part + "."): params[ours] for name, ours in names.items()}
        constants = self._constants(x.device).items()
        own |= {name.removeprefix(part + "."): b for name, b in constants if name.startswith(part + ".")}
        out: Tensor = functional_call(getattr(net, part), own, (x,))
        return out

    def standard(self, x: Tensor) -> Tensor:
        """x, standardised if the task has `mean` and `std`."""
        if self._shift is None or self._spread is None:
            return x
        return (x - self._shift.to(x.device)) / self._spread.to(x.device)

    def augmented(self, x: Tensor) -> Tensor:
        """A training batch with its random augmentations, for a loss of a method's own; `losses` applies them by itself."""
        for augment in self._augmentations:
            x = augment(x)
        return x

    @property
    def augments(self) -> bool:
        """Whether training batches are augmented, so that what is computed once for each row would be of other images."""
        return bool(self._augmentations)

    def refuse_mixup(self, method: str) -> None:
        """Refuse mixup for a method whose loss is not this task's."""
        if self._mixes:
            raise Mistake(f"{method} has a loss of its own, which cannot mix rows: leave mixup out of --augment.")

    def losses(self, params: Params, batch: Batch) -> Tensor:
        """The training loss of each row, augmented if the task says so."""
        x = self.augmented(batch["x"])

        def of(x: Tensor, y: Tensor) -> Tensor:
            return self.rows_loss(self.outputs(params, x, training=True), y)

        return mixed_losses(of, x, batch["y"]) if self._mixes else of(x, batch["y"])

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """The mean training loss. With a column `weight`, losses are weighted by it and divided by the number of rows."""
        losses = self.losses(params, batch)
        return (losses * batch["weight"]).mean() if "weight" in batch else losses.mean()

    def predict(self, params: Params, x: Tensor, size: int = 0) -> Tensor:
        """Outputs in evaluation mode, in batches of this size; 0: of `evaluation_batch`."""
        device = placement.current()
        params = placement.to_device(channels_last(params))
        with placement.autocast():
            outputs = self.batched(lambda part: self.outputs(params, part.to(device)), x, size)
        return outputs if placement.on_cpu() else outputs.float().cpu()

    @torch.no_grad()
    def batched(self, f: Callable[[Tensor], Tensor], x: Tensor, size: int = 0) -> Tensor:
        """f(x), computed in batches and without gradients: `task.batched(lambda x: task.features(params, x), x)`."""
        with Quick():
            return torch.cat([f(part) for part in x.split(size or evaluation_batch(x))])

    def measure(self, outputs: Tensor, y: Tensor) -> Measured:
        """The metrics of these outputs."""
        return self.measure_each(outputs, y, [len(y)])[0]

    def measure_each(self, outputs: Tensor, y: Tensor, sizes: Sequence[int]) -> list[Measured]:
        """The metrics of several nodes. Their rows follow one another; `sizes` are their numbers of rows."""
        return measure_each(outputs, y, sizes, self.metrics, self.more, lambda o, t: float(self.rows_loss(o, t).mean()))

    def metric_names(self) -> frozenset[str]:
        """The names of all metrics that `measure` returns."""
        names = CLASSIFICATION if self.metrics is None else ("loss", *self.metrics)
        return frozenset((*names, *self.more))

    def direction(self, name: str) -> Direction:
        """Which values of this metric are better."""
        return direction(name, self.more.get(name) or (self.metrics or {}).get(name))

    def evaluate(self, params: Params, rows: Rows) -> Measured:
        """The metrics of this model on these rows."""
        outputs = predict_rows(lambda x: self.predict(params, x), rows)
        assert outputs is not None
        return self.measure(outputs, rows["y"])

    def mean_loss(self, params: Params, rows: Rows) -> float:
        """The mean loss of this model on these rows."""
        loss = self.evaluate(params, rows)["loss"]
        assert loss is not None
        return loss

    def size(self) -> int:
        """The number of trained weights."""
        return count(weights(self.init_whole(0)))

    def restore(self, path: str | Path) -> Params:
        """Load a model that a run saved (`model.safetensors`)."""
        from safetensors.torch import load_file

        tensors = load_file(path)
        if missing := set(self.names) - set(tensors):
            raise Mistake(f"'{path}' is not a model of this task: it has no {min(missing)}.")
        return {ours: tensors[name] for name, ours in self.names.items()}
