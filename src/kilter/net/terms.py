"""The terms of a run: everything that decides what happens at a site, agreed before the first order.

Code never travels: the terms name the method, its settings and the network, and each side has the code. The digest of the terms
is what a site approves. It covers the experiment, the shape of the data, the weights to start from, the topology and the
participants, but not the run's random name, so the same terms keep their digest when a server starts again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

from kilter import data as kdata
from kilter.core import Data
from kilter.data.schema import MINIMUM, Column, merge
from kilter.data.split import carve, rows_of
from kilter.experiment import Experiment
from kilter.net.data_description import DataDescription
from kilter.net.fields import Fields
from kilter.net.frames import Head
from kilter.records.wire import Malformed
from kilter.topology import Topology

SENT = (  # the fields of an experiment that matter at a site
    "method",
    "settings",
    "model",
    "optimiser",
    "local",
    "cohort",
    "seed",
    "valid",
    "rounds",
    "evaluate_every",
    "robust",
)


@dataclass(frozen=True)
class Terms:
    """What a server tells a site when it arrives."""

    run: str
    session: str  # new each time the server starts
    experiment: dict[str, object]  # the fields in SENT, as plain values
    weights: str  # digest of the pre-trained weights; empty for none
    description: DataDescription
    ids: tuple[str, ...]  # everyone who takes part
    peers: tuple[str, ...]  # the sites that this site may write to
    sealed: bool  # sites write to each other, and the server passes on sealed letters that it cannot read

    @staticmethod
    def write(
        run: str, session: str, experiment: Experiment, description: DataDescription, topology: Topology, site: str
    ) -> Terms:
        """The terms for one site."""
        return Terms(
            run,
            session,
            {key: value for key, value in asdict(experiment).items() if key in SENT},
            file_digest(experiment.weights),
            description,
            tuple(topology.neighbours),
            tuple(topology.neighbours.get(site, ())),
            topology.kind == "peers",
        )

    def head(self) -> Head:
        return {"kind": "terms", "run": self.run, "session": self.session, **self._agreed()}

    def _agreed(self) -> dict[str, object]:
        return {
            "experiment": self.experiment,
            "weights": self.weights,
            "data": self.description.plain(),
            "ids": list(self.ids),
            "peers": list(self.peers),
            "sealed": self.sealed,
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> Terms:
        fields = Fields(head, "terms")
        if fields.text("kind", 20) != "terms":
            raise Malformed("terms were expected")
        experiment = fields.table("experiment")
        if not set(experiment) <= set(SENT):
            raise Malformed("the terms name unknown fields: install the same version of kilter on both sides")
        _check_plain(experiment)
        return Terms(
            fields.identifier("run"),
            fields.identifier("session"),
            experiment,
            fields.text("weights", 64, optional=True),
            DataDescription.parse(head.get("data")),
            fields.names("ids"),
            fields.names("peers"),
            fields.flag("sealed"),
        )

    @property
    def digest(self) -> str:
        """What a site approves."""
        text = json.dumps(self._agreed(), sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16).hexdigest()


def _check_plain(value: object, depth: int = 0) -> None:
    """Short texts, numbers, flags and small lists and tables of them."""
    if depth > 4:
        raise Malformed("the terms nest too deeply")
    if isinstance(value, dict | list):
        if len(value) > 1000:
            raise Malformed("the terms are too long")
        for key in value if isinstance(value, dict) else ():
            _check_plain(key, depth + 1)
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, depth + 1)
    elif isinstance(value, str):
        if len(value) > 1000 or not value.isprintable():
            raise Malformed("the terms contain an impossible text")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise Malformed("the terms contain an impossible number")


def peer_run_id(experiment: Experiment, description: DataDescription, peers: Mapping[str, str]) -> str:
    """The name of a run between peers: the same for all whose experiment, data and list of peers agree."""
    plain = {key: value for key, value in asdict(experiment).items() if key in (*SENT, "topology")}
    agreed = [plain, file_digest(experiment.weights), description.shape, description.classes, list(peers)]
    agreed += [] if description.schema is None else [description.schema.plain()]
    return blake2b(json.dumps(agreed, sort_keys=True).encode(), digest_size=16).hexdigest()


def file_digest(path: str) -> str:
    """Tells one file from another; empty for no file."""
    return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest() if path else ""


def describe(dataset: kdata.Dataset) -> DataDescription:
    """What a row of this data set looks like."""
    return DataDescription(tuple(dataset.x.shape[1:]), dataset.classes, dataset.mean, dataset.std, dataset.schema)


def describe_own(dataset: kdata.Dataset) -> DataDescription:
    """What a site says about its data before sites agree: of a table, the schema of its own training rows.

    A column with fewer than MINIMUM values is described as empty, because a mean of so few values would show them.
    """
    schema = dataset.own_schema
    if schema is None:
        return describe(dataset)
    columns = tuple(c if c.count >= MINIMUM else Column(c.name, "empty") for c in schema.columns)
    shown = replace(schema, columns=columns)
    return DataDescription((shown.width,), shown.classes, schema=shown)


def agree_on_data(descriptions: Mapping[str, DataDescription]) -> tuple[DataDescription, list[str]]:
    """One description for all, and the sites that differ from the majority (from the first site, if there is a tie).

    Channel means and deviations are those of all sites that agree, taken equally.
    """
    layout = {name: _layout(d) for name, d in descriptions.items()}
    usual = Counter(layout.values()).most_common(1)[0][0]
    first = next(d for name, d in descriptions.items() if layout[name] == usual)
    different = [name for name, d in descriptions.items() if layout[name] != usual or difference(first, d)]
    return _mean_description([d for name, d in descriptions.items() if name not in different]), different


def _layout(description: DataDescription) -> tuple[object, ...]:
    """What must be equal. The columns of tables may come in any order, and a site may lack classes."""
    if description.schema is not None:
        return (description.schema.target, tuple(sorted(description.schema.names)))
    return (description.shape, description.classes, description.mean is None)


def difference(usual: DataDescription, other: DataDescription) -> str:
    """How other data differ from the usual; empty if they fit."""
    if usual.schema is None or other.schema is None:
        return "" if _layout(usual) == _layout(other) else "shape or class names"
    return replace(usual.schema, classes=other.schema.classes).mismatch(other.schema)


def _mean_description(descriptions: Sequence[DataDescription]) -> DataDescription:
    first = descriptions[0]
    schemas = [d.schema for d in descriptions if d.schema is not None]
    if schemas:
        merged = merge(schemas)
        return DataDescription((merged.width,), merged.classes, schema=merged)
    means, stds = [d.mean or () for d in descriptions], [d.std or () for d in descriptions]
    if first.mean is None or first.std is None or len({len(v) for v in (*means, *stds)}) > 1:
        return first
    mean = tuple(sum(column) / len(means) for column in zip(*means, strict=True))
    square = [
        sum(s * s + m * m for s, m in zip(ss, ms, strict=True)) / len(means)
        for ss, ms in zip(zip(*stds, strict=True), zip(*means, strict=True), strict=True)
    ]
    std = tuple(max(q - m * m, 1e-12) ** 0.5 for q, m in zip(square, mean, strict=True))
    return replace(first, mean=mean, std=std)


def own_data(dataset: kdata.Dataset, name: str, seed: int, valid: float) -> Data:
    """A site's rows: its test rows are the data set's, and a share of its training rows is for validation."""
    tables = {"x": dataset.x, "y": dataset.y}
    three = carve(dataset.train.numpy(), seed, name, valid, 0.0, dataset.test.numpy())
    return Data(*(rows_of(tables, some) for some in three))
