"""The terms of a run: everything that decides what happens at a site, agreed before the first order.

Code never travels: the terms name the method, its settings and the network, and each side has the code. The digest of the terms
is what a site approves. It covers the experiment, the description of the data, the weights to start from, the topology and the
participants, but not the run's random name, so the same terms keep their digest when a server starts again. The fitted preparation
is not part of it: it is computed from statistics that sites send after they have approved the terms.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

from kilter import data as kdata
from kilter.core import Data
from kilter.data.preparation import AnyPreparation, Preparation, fit, parse_preparation
from kilter.data.schema import conflict, merge
from kilter.data.split import carve, rows_of
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.models.pretrained import is_pretrained_spec
from kilter.net.data_description import DataDescription
from kilter.net.fields import Fields
from kilter.net.frames import Head
from kilter.net.versions import PROTOCOLS, common_protocol
from kilter.plugins import is_file_spec
from kilter.records.wire import Malformed
from kilter.runtimes.roles import parse_roles
from kilter.topology import Topology, topology

SENT = (  # the fields of an experiment that matter at a site
    "method",
    "settings",
    "model",
    "lora",
    "personal",
    "task",
    "loss",
    "metrics",
    "augment",
    "optimiser",
    "local",
    "cohort",
    "seed",
    "valid",
    "rounds",
    "evaluate_every",
    "robust",
    "server",
    "precision",  # only if it is not fp32: earlier releases know nothing else
)


def sent_fields(experiment: Experiment) -> dict[str, object]:
    """What a site is told of the experiment."""
    return {
        key: value for key, value in asdict(experiment).items() if key in SENT and (key, value) != ("precision", "fp32")
    }


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
    preparation: AnyPreparation | None = None  # how to prepare rows, fitted on statistics of the sites; None: not yet
    protocol: int = PROTOCOLS[0]  # that the server chose
    topology: str = ""  # where sites aggregate in turn or in groups; empty for a star and for other graphs of peers
    frozen: str = ""  # digest of the frozen weights; empty: there are none, or statistics decide their shapes
    roles: str = ""  # of participants by name, where sites aggregate in turn or in groups

    @property
    def rotates(self) -> bool:
        """Whether sites aggregate in turn, this site among them."""
        return self.topology == "rotating"

    def discloses(self) -> frozenset[str]:
        """What leaves a site because of the topology: in groups, members tell their aggregator how many rows they have."""
        return frozenset({"counts"} if self.topology.startswith("aggregators") else ())

    def group_of(self, site: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The group of a site, its aggregator first, and the aggregators of all groups; both empty where there are no groups."""
        aggregators = parse_roles(self.roles).group_aggregators(self.topology, self.ids)
        if not aggregators:
            return (), ()
        return topology(self.topology, self.ids, 0, aggregators).group(site), aggregators

    @property
    def aggregators(self) -> tuple[str, ...]:
        """The sites that aggregate in turn."""
        return parse_roles(self.roles).aggregators(self.ids)

    def turns(self, round: int) -> tuple[str, ...]:
        """Who aggregates in this round: the first of these that is there."""
        seed = self.experiment.get("seed", 0)
        return topology(self.topology, self.ids, seed if isinstance(seed, int) else 0).turns(round, self.aggregators)

    @property
    def seals_letters(self) -> bool:
        """Whether a site seals each letter of a reply. Where sites aggregate in turn, whole packets are sealed instead."""
        return self.sealed and not self.rotates

    @staticmethod
    def write(
        run: str,
        session: str,
        experiment: Experiment,
        description: DataDescription,
        graph: Topology,
        site: str,
        preparation: AnyPreparation | None = None,
        frozen: str = "",
    ) -> Terms:
        """The terms for one site."""
        return Terms(
            run,
            session,
            sent_fields(experiment),
            file_digest(experiment.weights),
            description,
            tuple(graph.neighbours),
            tuple(graph.neighbours.get(site, ())),
            graph.kind != "star",
            preparation,
            topology=graph.spec if graph.kind == "rotating" or graph.groups else "",
            frozen=frozen,
            roles=experiment.roles,
        )

    def head(self) -> Head:
        preparation = None if self.preparation is None else self.preparation.plain()
        core = {"kind": "terms", "run": self.run, "session": self.session, **self._agreed()}
        return core | {"preparation": preparation}

    def _agreed(self) -> dict[str, object]:
        turns = {"topology": self.topology, "roles": self.roles} if self.topology else {}
        return turns | {
            "experiment": self.experiment,
            "weights": self.weights,
            "data": self.description.plain(),
            "ids": list(self.ids),
            "peers": list(self.peers),
            "sealed": self.sealed,
            **({"frozen": self.frozen} if self.frozen else {}),
        }

    @staticmethod
    def parse(head: Mapping[str, object]) -> Terms:
        fields = Fields(head, "terms")
        if fields.text("kind", 20) != "terms":
            raise Malformed("terms were expected")
        experiment = fields.table("experiment")
        if not set(experiment) <= set(SENT):
            raise Malformed("the terms name unknown fields: update kilter at this site")
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
            _preparation(head),
            _protocol(fields, head),
            _topology(fields),
            fields.text("frozen", 64, optional=True),
            _roles(fields),
        )

    @property
    def digest(self) -> str:
        """What a site approves."""
        text = json.dumps(self._agreed(), sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16).hexdigest()


def frozen_digest(experiment: Experiment, description: DataDescription) -> str:
    """The digest of the frozen weights of this experiment's network, if the shape of a row is known before statistics are."""
    if not experiment.lora and not is_file_spec(experiment.model) and not is_pretrained_spec(experiment.model):
        return ""  # our own networks have none
    schema = description.schema
    preparation = None
    if schema is not None:
        if any(c.vocabulary or (c.kind == "category" and not c.embed) for c in schema.columns):
            return ""
        preparation = fit(schema, [{"columns": {c.name: {"count": 0} for c in schema.measured}}])
    return experiment.make(**description.row_facts(preparation)).task.frozen_digest()


def _protocol(fields: Fields, head: Mapping[str, object]) -> int:
    """The protocol that the server chose; releases before ranges do not say."""
    chosen = fields.integer("protocol", 1) if "protocol" in head else PROTOCOLS[0]
    return common_protocol((chosen, chosen), "server")


def _topology(fields: Fields) -> str:
    """Empty, rotating, or aggregators:k."""
    text = fields.text("topology", optional=True)
    name, _, count = text.partition(":")
    if text not in ("", "rotating") and not (name == "aggregators" and count.isdecimal() and int(count)):
        raise Malformed("the terms have an impossible topology")
    return text


def _roles(fields: Fields) -> str:
    text = fields.text("roles", 10_000, optional=True)
    try:
        parse_roles(text)
    except Mistake as e:
        raise Malformed(f"the terms have impossible roles: {e}") from None
    return text


def _preparation(head: Mapping[str, object]) -> AnyPreparation | None:
    if head.get("preparation") is None:
        return None
    try:
        return parse_preparation(head["preparation"])
    except ValueError as error:
        raise Malformed(f"the terms have an impossible preparation: {error}") from None


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


def peer_run_id(
    experiment: Experiment,
    description: DataDescription | None,
    preparation: Preparation | None,
    peers: Mapping[str, str],
) -> str:
    """The name of a run between peers: the same for all whose experiment, data and list of peers agree.

    Without a description, peers have yet to agree on their tables.
    """
    plain = sent_fields(experiment) | {"topology": experiment.topology}
    data = ["tables"] if description is None else [description.shape, description.classes]
    plain |= {"roles": experiment.roles} if experiment.roles else {}
    agreed: list[object] = [plain, file_digest(experiment.weights), *data, list(peers)]
    agreed += [] if preparation is None else [preparation.plain()]
    return blake2b(json.dumps(agreed, sort_keys=True).encode(), digest_size=16).hexdigest()


def file_digest(path: str) -> str:
    """Tells one file from another; empty for no file."""
    return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest() if path else ""


def agree_on_data(descriptions: Mapping[str, DataDescription]) -> tuple[DataDescription, list[str]]:
    """One description for all, and the sites that differ from the majority (from the first site, if there is a tie)."""
    layout = {name: _layout(d) for name, d in descriptions.items()}
    usual = Counter(layout.values()).most_common(1)[0][0]
    first = next(d for name, d in descriptions.items() if layout[name] == usual)
    different = [name for name, d in descriptions.items() if layout[name] != usual or difference(first, d)]
    schemas = [d.schema for name, d in descriptions.items() if name not in different and d.schema is not None]
    if not schemas:
        return first, different
    merged = merge(schemas)
    return DataDescription((len(merged.columns),), merged.classes, schema=merged), different


def _layout(description: DataDescription) -> tuple[object, ...]:
    """What must be equal. The columns of tables may come in any order, and a site may lack classes."""
    if description.schema is not None:
        return (description.schema.target, tuple(sorted(description.schema.names)))
    return (description.shape, description.classes, description.normalised, description.inputs)


def difference(usual: DataDescription, other: DataDescription) -> str:
    """How other data differ from the usual; empty if they fit."""
    if usual.schema is None or other.schema is None:
        return "" if _layout(usual) == _layout(other) else "shape or class names"
    fitting = replace(usual.schema, classes=other.schema.classes)
    return fitting.mismatch(other.schema) or conflict(usual.schema, other.schema)


def own_data(dataset: kdata.Dataset, name: str, seed: int, valid: float) -> Data:
    """A site's rows: its test rows are the data set's, and a share of its training rows is for validation."""
    tables = {"x": dataset.x, "y": dataset.y}
    three = carve(dataset.train.numpy(), seed, name, valid, 0.0, dataset.test.numpy())
    return Data(*(rows_of(tables, some) for some in three))
