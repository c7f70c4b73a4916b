"""The records of a run as types. `kilter.records.codec` writes and reads them as JSON; docs/reference/schema.json describes it.

rounds.jsonl has one `Round` a line, summary.json a `Summary`, clients.json a `Clients`; a checkpoint holds a `Checkpoint`.
No number in a record is NaN or infinite: such a number is recorded as None, with a notice that says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kilter.metrics import Direction

FORMAT = 2  # of every file with records; files without a format are of version 1 (see kilter.records.upgrade)

Metrics = dict[str, float | None]
GlobalModel = Literal["global", "mean of personal models"]
ClientModel = Literal["personal", "received"]
Outcome = Literal["trained", "no valid replies"]
FailureKind = Literal["absent", "error", "not finite", "shape", "too large", "unreadable", "no replies"]


@dataclass(frozen=True)
class Spread:
    """A metric over the clients. `worst_decile` is the mean over the worst tenth of them, at least one client."""

    mean: float
    std: float
    min: float
    max: float
    worst_decile: float


@dataclass(frozen=True)
class ModelScores:
    """The metrics of one model on the common test set; of a classifier also those of each class, in full evaluations."""

    metrics: Metrics
    per_class: dict[str, list[float]] | None = None
    confusion: list[list[int]] | None = None  # row: true class, column: predicted class


@dataclass(frozen=True)
class ClientReport:
    """What one client reports about the models it holds. None: the client has no such model or no such rows."""

    n_test: int
    n_valid: int
    test: Metrics | None = None  # the received model on the client's test rows
    valid: Metrics | None = None
    own_test: Metrics | None = None  # the client's own model
    own_valid: Metrics | None = None
    own_bench: Metrics | None = None  # the client's own model on the common test set
    local: float | None = None  # accuracy on the common test set, classes weighted by their shares at this client
    common: float | None = None  # accuracy on the common test set


@dataclass(frozen=True)
class Evaluation:
    """The state of a run as evaluated after one round."""

    round: int
    global_model: GlobalModel  # what `scores` is about: the global model, or the mean over the clients' own models
    scores: ModelScores | None  # on the common test set; None: there is none
    client: dict[str, Spread] = field(default_factory=dict)  # by metric: the model a client would use, on its test rows
    bench: dict[str, Spread] = field(default_factory=dict)  # the same model's `local` and `common` accuracy
    valid: Metrics | None = None  # on all validation rows together
    variants: dict[str, ModelScores] = field(default_factory=dict)  # the method's other results

    @property
    def global_accuracy(self) -> float | None:
        return self.scores.metrics.get("accuracy") if self.scores else None

    @property
    def client_accuracy(self) -> Spread | None:
        return self.client.get("accuracy")


@dataclass(frozen=True)
class Failure:
    """A reply that did not come or was refused."""

    node: str
    step: str
    reason: str
    kind: FailureKind = "absent"


@dataclass(frozen=True)
class NodeNote:
    """A sentence that a step left for the record."""

    node: str
    step: str
    text: str


@dataclass(frozen=True)
class NodeNotice:
    """Something that did not happen as the method intends, at one node in one round."""

    node: str
    step: str
    what: str


@dataclass(frozen=True)
class Point:
    """One value of a series that a method records. `at` is usually the round."""

    series: str
    node: str
    at: int
    value: float


@dataclass(frozen=True)
class Histogram:
    """How values are distributed: `counts[i]` of them lie between `edges[i]` and `edges[i + 1]`."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Picture:
    """A small picture for a report: a PNG file in base64."""

    png: str
    caption: str = ""


@dataclass(frozen=True)
class Exhibit:
    """Something a method shows in the report of a run. One of `values`, `histogram` and `pictures` is there, or the last two."""

    name: str
    node: str
    values: dict[str, float] | None = None  # by name, usually of a node
    histogram: Histogram | None = None  # of one number for each training row
    pictures: list[Picture] = field(default_factory=list)
    rows: list[str] = field(
        default_factory=list
    )  # the rows with the largest and the smallest number, where they are no pictures


@dataclass(frozen=True)
class Partition:
    """partition.json: which rows a simulation gave its clients."""

    clients: dict[str, list[int]]  # by client: rows of each class
    classes: list[str] = field(default_factory=list)  # their names, where known
    targets: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # by client, if targets are not classes: statistics
    format: int = FORMAT


@dataclass(frozen=True)
class Notice:
    """The same notice over a whole run: how often, in which rounds, at which nodes."""

    what: str
    count: int
    rounds: list[int]
    nodes: list[str]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a runtime books during a round: letters, replies, training. Round 0 is the set-up."""

    loss: float | None = None  # mean training loss over all steps
    steps: int = 0  # of the local optimisers
    exchanges: int = 0  # pools in which nodes sent something
    replies: int = 0  # accepted replies of training steps that carry something
    participants: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[NodeNote] = field(default_factory=list)
    notices: list[NodeNotice] = field(default_factory=list)
    series: list[Point] = field(default_factory=list)
    listens: dict[str, dict[str, float]] = field(default_factory=dict)  # by node: how much it took of others' models
    exhibits: list[Exhibit] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_by_node: dict[str, tuple[int, int]] = field(default_factory=dict)  # (up, down)
    evaluation_bytes_up: int = 0
    evaluation_bytes_down: int = 0
    fit_seconds: dict[str, float] = field(default_factory=dict)  # seconds of training by step


@dataclass(frozen=True, kw_only=True)
class Round(Traffic):
    """One line of rounds.jsonl. The evaluation fields are empty in rounds without evaluation."""

    round: int
    seconds: float = 0.0
    global_metrics: Metrics | None = None
    client: dict[str, Spread] = field(default_factory=dict)
    by_client: dict[str, float] = field(
        default_factory=dict
    )  # main metric on the client's test rows; of few clients only
    bench: dict[str, Spread] = field(default_factory=dict)
    valid: Metrics | None = None
    variants: dict[str, Metrics] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def global_accuracy(self) -> float | None:
        return (self.global_metrics or {}).get("accuracy")

    @property
    def client_accuracy(self) -> Spread | None:
        return self.client.get("accuracy")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run: summary.json, the last file a run writes."""

    method: str
    rounds: int
    seed: int
    clients: int
    topology: str
    outcome: Outcome = "trained"
    setup_rounds: int = 0  # exchanges before the first round
    global_accuracy: float | None = None
    global_model: GlobalModel = "global"  # what `global_accuracy` is about
    client_accuracy: Spread | None = None
    client_model: ClientModel = "received"  # what `client_accuracy` is about: on the client's own test rows
    local_accuracy: Spread | None = None
    common_accuracy: Spread | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    fit_seconds: dict[str, float] = field(default_factory=dict)
    failures: int = 0
    notices: list[Notice] = field(default_factory=list)
    seconds: float = 0.0
    workers: dict[str, int] = field(default_factory=dict)  # processes that shared each step
    device: str = "cpu"
    precision: str = "fp32"  # of layers
    stack_width: int = 1  # clients that trained in one stack, at most; it shows in the last bits
    stopped_early: bool = False
    received: list[str] = field(default_factory=list)  # sites that have the final model, in a deployed run
    last: Evaluation
    best: Evaluation | None = None  # the best round on validation rows; None without validation rows
    chosen_by: str = "accuracy"  # the metric that chooses the best round
    directions: dict[str, Direction] = field(default_factory=dict)  # of every metric
    format: int = FORMAT


@dataclass(frozen=True)
class ClientsAt:
    """Every client's report at one round."""

    round: int
    clients: dict[str, ClientReport]


@dataclass(frozen=True)
class Clients:
    """clients.json: every client's report at the last round and at the best."""

    last: ClientsAt
    best: ClientsAt | None = None
    format: int = FORMAT


@dataclass(frozen=True)
class Evaluated:
    """An evaluation with the reports it is made of."""

    evaluation: Evaluation
    reports: dict[str, ClientReport]


@dataclass
class Checkpoint:
    """Where a run stands; resuming goes on from here."""

    round: int = 0
    last: Evaluated | None = None
    best: Evaluated | None = None
    score: float | None = None  # of the best round
    stale: int = 0  # evaluations since then
    stopped: bool = False
    seconds: float = 0.0
    before: Standing | None = None  # the choice of the best round before the final evaluation, to extend a finished run
    format: int = FORMAT


@dataclass(frozen=True)
class Standing:
    """Which round is best so far."""

    last: Evaluated | None
    best: Evaluated | None
    score: float | None
    stale: int
