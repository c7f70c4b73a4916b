"""What a server and its sites agree on before the first order. Code never travels: names do, and each side has the code.

The server's terms name the method, its settings and the network, and say what a row looks like. A site builds them from its own
installation, and only what it is willing to run: registered methods, or files that it named itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kilter import data as kdata
from kilter.core import Data, Method
from kilter.data.split import carve, rows_of
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.plugins import is_file_spec
from kilter.runtimes.step_names import StepName
from kilter.runtimes.step_runner import resolve
from kilter.topology import Topology

SENT = ("method", "settings", "model", "optimiser", "local", "cohort", "seed", "valid", "rounds")


@dataclass(frozen=True)
class Facts:
    """What a row looks like; no row, and no number of rows."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...] | None = None  # of colour images, by channel
    std: tuple[float, ...] | None = None

    @staticmethod
    def of(dataset: kdata.Dataset) -> Facts:
        return Facts(tuple(dataset.x.shape[1:]), dataset.classes, dataset.mean, dataset.std)

    @staticmethod
    def read(value: Any) -> Facts:
        """From plain values of the other side, each checked."""
        try:
            shape, classes = tuple(value["shape"]), tuple(value["classes"])
            mean, std = (None if value.get(k) is None else tuple(map(float, value[k])) for k in ("mean", "std"))
            fine = all(type(n) is int and 0 < n < 2**24 for n in shape) and 1 <= len(shape) <= 3
            if not fine or not 1 <= len(classes) <= 10**5 or not all(isinstance(c, str) for c in classes):
                raise ValueError
        except (LookupError, TypeError, ValueError, AttributeError):
            raise Mistake("The other side's description of its data cannot be understood.") from None
        return Facts(shape, classes, mean, std)

    @staticmethod
    def together(found: Mapping[str, Facts]) -> Facts:
        """What all sites say; where they give means and deviations by channel, those of all of them taken equally."""
        first = next(iter(found.values()))
        for name, facts in found.items():
            if (facts.shape, facts.classes) != (first.shape, first.classes):
                raise Mistake(
                    f"The sites' data differ: {next(iter(found))} has rows {first.shape} and {len(first.classes)} classes, "
                    f"{name} {facts.shape} and {len(facts.classes)}. Give the server a file with all classes (--data)."
                )
        if first.mean is None or first.std is None:
            return first
        means, stds = [f.mean or () for f in found.values()], [f.std or () for f in found.values()]
        mean = tuple(sum(column) / len(means) for column in zip(*means, strict=True))
        square = [
            sum(s * s + m * m for s, m in zip(ss, ms, strict=True)) / len(means)
            for ss, ms in zip(zip(*stds, strict=True), zip(*means, strict=True), strict=True)
        ]
        return replace(
            first, mean=mean, std=tuple(max(q - m * m, 1e-12) ** 0.5 for q, m in zip(square, mean, strict=True))
        )


def write(run: str, life: str, experiment: Experiment, facts: Facts, topology: Topology, name: str) -> dict[str, Any]:
    """The terms as this site gets them."""
    return {
        "run": run,
        "life": life,
        "experiment": {key: value for key, value in asdict(experiment).items() if key in SENT},
        "weights": digest(experiment.weights),
        "facts": asdict(facts),
        "ids": list(topology.neighbours),
        "peers": list(topology.neighbours.get(name, ())),
        "relay": topology.kind == "peers",
    }


def agreement(experiment: Experiment, facts: Facts, peers: Mapping[str, str]) -> str:
    """The name of a run between peers: the same for all who mean the same run."""
    plain = {
        key: value
        for key, value in asdict(experiment).items()
        if key in (*SENT, "topology", "evaluate_every", "robust")
    }
    told = [plain, digest(experiment.weights), facts.shape, facts.classes, list(peers)]
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest(path: str) -> str:
    """What tells one file of weights from another."""
    return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest() if path else ""


@dataclass(frozen=True)
class Willing:
    """What a site lets a server ask of it."""

    methods: Collection[str] = ()  # by name; none: every method that is installed here
    steps: Collection[str] = ()  # by name; none: every step of the method
    trust: Sequence[str] = ()  # files of one's own, file.py:Name, in the place of the server's of the same name
    weights: str = ""  # this site's copy of the pre-trained weights

    def own(self, spec: str) -> str:
        """The name of something to load: a registered one as it stands, a file only if this site named it."""
        if not is_file_spec(spec):
            return spec
        for mine in self.trust:
            if Path(mine).name == Path(spec).name:
                return mine
        raise Mistake(
            f"The server wants '{Path(spec).name}', a file: get it, read it, and allow it with --trust {Path(spec).name}."
        )

    def build(self, terms: Mapping[str, Any], facts: Facts) -> tuple[Experiment, Method]:
        """The experiment and the method of these terms, as this site would run them."""
        plain = terms["experiment"]
        if not isinstance(plain, Mapping) or not set(plain) <= set(SENT):
            raise Mistake("The server's terms cannot be understood: is its version of kilter another?")
        plain = dict(plain)
        name = str(plain.get("method"))
        if self.methods and name not in self.methods and Path(name).name not in self.methods:
            raise Mistake(f"The server wants to run '{name}', and this site only allows {', '.join(self.methods)}.")
        plain["method"], plain["model"] = self.own(name), self.own(str(plain.get("model")))
        if terms["weights"]:
            if not self.weights or digest(self.weights) != terms["weights"]:
                raise Mistake(
                    "The server begins from pre-trained weights: give this site's copy of that file (--weights)."
                )
            plain["weights"] = self.weights
        experiment = Experiment.of(plain)
        return experiment, experiment.make(facts.shape, len(facts.classes), facts.mean, facts.std)

    def allow(self, method: Method, step: StepName) -> None:
        """Refuse a step that is not the method's, or not allowed here."""
        resolve(method, step)
        if self.steps and str(step) not in self.steps and step.step not in self.steps:
            raise Mistake(f"step '{step}' is not allowed at this site")


def own_data(dataset: kdata.Dataset, name: str, seed: int, valid: float) -> Data:
    """A site's rows: its test rows are the data set's, a share of its training rows is for validation."""
    tables = {"x": dataset.x, "y": dataset.y}
    three = carve(dataset.train.numpy(), seed, name, valid, 0.0, dataset.test.numpy())
    return Data(*(rows_of(tables, some) for some in three))
