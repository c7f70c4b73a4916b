"""An experiment: everything that determines the results of a run. It comes from a TOML file, the command line or Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w
import torch

from kilter.blocks.server_optimiser import parse as parse_server
from kilter.core import SERVER, Data, Method
from kilter.data import DATASETS, Dataset, Split, TableOptions, load, split
from kilter.data.catalog import GROUPED
from kilter.data.partition_rules import parse as parse_partition
from kilter.data.preparation import code_columns, read_schema
from kilter.data.prepare_settings import parse_prepare
from kilter.data.row_facts import RowFacts, check_reader, row_facts
from kilter.data.split import SKIPPED, public_file
from kilter.data.targets import TASKS
from kilter.errors import Mistake, unknown
from kilter.federate import CHECKPOINT_SECONDS, NothingTrained, Result, Watch, federate
from kilter.methods import check_use, find
from kilter.models import build as build_model
from kilter.models import default_model, load_weights
from kilter.models.inputs import Input, PlainInput, needed_inputs
from kilter.models.lora import add_adapters, parse_lora
from kilter.options import check, check_values, fill, option, own_fields
from kilter.plugins import is_file_spec
from kilter.records import wire
from kilter.records.model_info import EXPERIMENT, ModelInfo
from kilter.records.notices import nothing_trained
from kilter.records.run_folder import Store, write
from kilter.records.toml_file import read_toml
from kilter.records.versions import versions
from kilter.runtimes.base import Runtime
from kilter.runtimes.robust import parse as parse_robust
from kilter.runtimes.roles import parse_roles
from kilter.runtimes.simulation import Missing, Simulation, SimulationOptions
from kilter.runtimes.trial import try_run
from kilter.seeds import numpy_generator
from kilter.tasks import Task
from kilter.tasks.augment import check_augmentation
from kilter.tasks.kinds import CLASSIFICATION, choose_kind, kind_of
from kilter.tasks.losses import TargetFacts, class_weights
from kilter.tasks.training_loop import TrainingLoop
from kilter.topology import topology
from kilter.train import Plan, TorchOptimiser, plan_class

CLIENTS, PUBLIC, DIVIDED = 10, 5, "dirichlet:0.5"  # where neither the data nor the user says
FILES = ("data", "weights", "public_file", "test_file", "schema", "tokenizer")  # fields that name a file
# Creates a simulation that runs elsewhere than in processes of this machine.
MakeSimulation = Callable[["Experiment", Mapping[str, Data], RowFacts, SimulationOptions], Simulation]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that defines a run except where it runs."""

    method: str = option("fedavg", "A method listed by `kilter methods`, or my_method.py:MyMethod.")
    settings: dict[str, Any] = option({}, "The method's own settings (on the command line: --set mu=0.1).")
    data: str = option("digits", "A data set listed by `kilter datasets`, or your own file or folder.")
    task: Literal[
        "auto", "binary", "multi-class", "multi-label", "regression", "survival", "segmentation", "text", "next-token"
    ] = option("auto", "What to learn; auto: as the data says.")
    loss: str = option("", "Loss, such as focal:2, label-smoothing:0.1, class-weights, huber:1 or discrete-time:10.")
    metrics: str = option("", "More metrics than the task's own, separated by commas, such as auroc,brier,by_class.")
    label: str = option("", "Column of the labels in your table; default: label or y.")
    event: str = option("", "Column of the event (1) or censoring (0), for the task survival.")
    client: str = option("", "Column of the clients in your table; default: client or group, if there is one.")
    drop: str = option("", "Columns of your table to leave out, separated by commas.")
    test_file: str = option("", "A table with the test rows of your table.")
    test_size: float = option(0.0, "Share of your table's rows used for test; 0: one row in five.", at_least=0, below=1)
    text: str = option("", "Columns of your table that hold free text, separated by commas.")
    tokenizer: str = option("", "A tokenizer file (Hugging Face tokenizers) for these texts; default: words.")
    series: str = option("", "Columns of your table that are time series, as patterns, such as hr_*,bp_*.")
    prepare: str = option("", "How to prepare your table, such as fill=median,clip=0.01,parts=yes.")
    image_size: str = option("", "Resize your images to this many pixels: 64, or 64x48 (height x width).")
    image_mode: Literal["", "grey", "rgb"] = option("", "Read your images as grey or rgb; default: grey if all are.")
    schema: str = option("", "A schema.toml of your table, or the preparation.toml of a run to reuse.")
    rows: int = option(0, "Use only this many training rows, the same for every seed; 0: all.", at_least=0)
    partition: str = option(
        "auto", "A rule listed by `kilter partitions`; auto: natural if the data names clients, else dirichlet:0.5."
    )
    clients: int = option(0, "Number of clients; 0: all that the data names, otherwise 10.", at_least=0)
    valid: float = option(0.1, "Share of a client's rows used for validation.", at_least=0, below=1)
    test: float = option(0.15, "Share of a client's rows used for its own test.", at_least=0, below=1)
    public: int = option(0, "Rows of each class for the aggregator; default: 5 if the method needs some.", at_least=0)
    public_file: str = option("", "A file with the aggregator's rows, instead of --public.")
    model: str = option(
        "auto",
        "A model listed by `kilter models`, my_model.py:Net, hf:NAME_OR_PATH or timm:NAME; auto: as the data needs.",
    )
    weights: str = option("", "Pre-trained weights: a .safetensors or .pt file.")
    lora: str = option("", "Train low-rank adapters and the head only, such as r=8,targets=query+value (needs peft).")
    personal: str = option("", "Layers that stay at each client, as patterns separated by commas, such as head.*.")
    augment: str = option("", "Augmentation of training batches: flip, crop, colour, mixup, separated by commas.")
    optimiser: str = option(
        "sgd", "Optimiser of the clients: sgd, adam, adamw, a class of torch.optim, or my_loop.py:train."
    )
    local: dict[str, Any] = option({}, "The optimiser's settings (on the command line: --lr 0.01 ...).")
    rounds: int = option(20, "Number of rounds.", at_least=1)
    cohort: float = option(1.0, "Share of the clients that take part in a round.", above=0, at_most=1)
    topology: str = option(
        "", "A topology listed by `kilter topologies`; default: star, or full if the method needs it."
    )
    roles: str = option("", "Roles by name (rotating, aggregators:k): a=aggregator,b=trainer,p=proxy,d=idle.")
    robust: str = option("", "Defence against malicious clients: clip:1, median, trimmed:0.2 or krum:0.2.")
    server: str = option("", "Server optimiser: momentum, adam, yogi or adagrad, such as adam:lr=0.03,tau=0.001.")
    missing: float = option(0.0, "Probability that a client does not answer a call (simulated).", at_least=0, below=1)
    seed: int = option(0, "Seed of every random choice.", at_least=0)
    evaluate_every: int = option(1, "Rounds between evaluations; the last round is always evaluated.", at_least=1)
    plain: bool = option(False, "Simulate without accelerated code: slower, and other last bits.")
    device: str = option("cpu", "Device of the simulation: cpu, cuda, cuda:1, mps, xpu; auto: the best there is.")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = option("fp32", "Precision of layers; parameters stay float32.")
    patience: int = option(0, "Stop after this many evaluations without improvement; 0: never.", at_least=0)

    def __post_init__(self) -> None:
        check(self, "the experiment")

    # Reading and writing -------------------------------------------------------------------------------------------

    @staticmethod
    def of(values: Mapping[str, Any]) -> Experiment:
        """An experiment from plain values. Every value is checked."""
        values = {k: v for k, v in values.items() if k != "versions"}
        nested = {k: values.pop(k) for k in ("settings", "local") if k in values}
        for name, part in nested.items():
            if not isinstance(part, Mapping):
                raise Mistake(f"{name} of the experiment is a table of fields, not {part!r}: write a section [{name}].")
        plain = fill(
            Experiment,
            values,
            "experiment",
            [f.name for f in fields(Experiment) if f.name not in ("settings", "local")],
        )
        plain |= {k: dict(v) for k, v in nested.items()}
        return Experiment(**plain).checked()

    @staticmethod
    def read(path: str | Path) -> Experiment:
        """Read an experiment from a TOML file."""
        return Experiment.of(read_toml(Path(path)))

    def checked(self) -> Experiment:
        """Refuse names and values that cannot work, before anything is loaded. Paths become absolute."""
        if self.robust:
            parse_robust(self.robust)
        parse_server(self.server)
        parse_lora(self.lora)
        if self.task != "auto":
            kind_of(self.task).check(self.loss, self.metrics)
        settings, plan = self._settings()
        chosen = self.topology or ("full" if "everyone" in find(self.method).needs else "star")
        parse_roles(self.roles, chosen)
        if not chosen.startswith("edges:"):  # with as many clients as the data names, only the name can be checked
            topology(chosen, [str(k) for k in range(self.clients or 50)], self.seed)
        if self.patience and not self.valid:
            raise Mistake(
                "patience stops a run by its validation rows, and valid = 0 leaves none: set valid, or no patience."
            )
        if self.public and self.public_file:
            raise Mistake("Set either public or public_file for the aggregator's rows, not both.")
        files: dict[str, str] = {k: getattr(self, k) for k in FILES}
        paths: dict[str, Any] = {
            k: str(Path(v).absolute()) for k, v in files.items() if v and v not in DATASETS and Path(v).exists()
        }
        local = {f.name: getattr(plan, f.name) for f in fields(plan)}
        if self.partition == "auto" and self.data in DATASETS:
            paths["partition"] = "natural" if self.data in GROUPED else DIVIDED
        return replace(self, settings=settings, local=local, topology=chosen, public=self._public_rows(), **paths)

    def _public_rows(self) -> int:
        """Rows of each class for the aggregator. A method that cannot do without gets PUBLIC, unless it has others."""
        own = self.public or self.public_file or "public" not in find(self.method).needs
        if own or (self.partition != "auto" and parse_partition(self.partition)[0].public):
            return self.public
        return PUBLIC

    def _settings(self) -> tuple[dict[str, Any], Plan]:
        """The settings of the method, and the plan. A setting with the name of a field of the plan changes the plan."""
        kind = find(self.method)
        planned = TrainingLoop if is_file_spec(self.optimiser) else plan_class(self.optimiser)
        own, plan_names = own_fields(kind, Method), {f.name for f in fields(planned)}
        for name in self.settings:
            if name not in own and name not in plan_names:
                if not own:
                    raise Mistake(f"The method {self.method} has no settings of its own, but '{name}' was given.")
                raise unknown(f"setting of {self.method}", name, own)
        of_method = {k: v for k, v in self.settings.items() if k in own}
        of_plan = {k: v for k, v in self.settings.items() if k not in own}
        fields_of_plan = fill(planned, {**self.local, **of_plan}, f"{self.optimiser} optimiser")
        if planned in (TorchOptimiser, TrainingLoop):
            fields_of_plan["name"] = self.optimiser
        falls = fields_of_plan.get("schedule", "constant") != "constant"
        by_round = fields_of_plan.get("schedule_by", "round") == "round"
        if falls and by_round and not fields_of_plan.get("schedule_length"):
            fields_of_plan["schedule_length"] = self.rounds
        plan = planned(**fields_of_plan)
        settings = fill(kind, of_method, f"method {self.method}", own)
        check_values(own.values(), settings, kind.__name__)
        return settings, plan

    def write(self, before: Path | None = None) -> str:
        """The text of a TOML file that repeats the run. `before`: its file when it had fewer rounds."""
        earlier = read_toml(before).get("versions") if before and before.exists() else None
        return tomli_w.dumps({**asdict(self), "versions": versions(earlier)})

    # Building ------------------------------------------------------------------------------------------------------

    def table_options(self) -> TableOptions:
        """How to read a user's table."""
        lists = (self.drop, self.text, self.series)
        drop, text, series = (tuple(filter(None, map(str.strip, names.split(",")))) for names in lists)
        return TableOptions(
            self.label,
            self.client,
            drop,
            self.test_file,
            self.test_size,
            text,
            series,
            self.tokenizer,
            self.prepare,
            self.task if self.task in (*TASKS, "text", "segmentation") else "",
            self.event,
            self.image_size,
            self.image_mode,
            code_columns(read_schema(self.schema)) if self.schema else (),
        )

    def dataset(self) -> Dataset:
        """The data set, with at most `rows` training rows."""
        options = self.table_options()
        schema = read_schema(self.schema) if self.schema else None
        whole = load(self.data, schema=schema, table=options, prepare=False)
        if self.data in DATASETS and (own := [*options.chosen(), *(["schema"] if self.schema else [])]):
            raise Mistake(f"'{self.data}' is built in and not a table of yours: leave out {', '.join(own)}.")
        if not self.rows:
            return whole
        if self.rows > len(whole.train):
            raise Mistake(f"rows is {self.rows}, but '{self.data}' has only {len(whole.train)} training rows.")
        chosen = numpy_generator("rows", self.rows).permutation(whole.train.numpy())[: self.rows]
        return replace(whole, train=torch.from_numpy(np.sort(chosen)))

    def partition_of(self, dataset: Dataset) -> str:
        """The rule that divides this data set among clients."""
        if self.partition != "auto":
            return self.partition
        return DIVIDED if dataset.groups is None else "natural"

    def model_of(self, shape: tuple[int, ...], task: str) -> str:
        """The model for rows of this shape and what they are for."""
        if self.model != "auto":
            return self.model
        in_order = "text" in (task, self.task) or (bool(self.text) and parse_prepare(self.prepare).sequence > 0)
        return default_model(shape, task, in_order)

    def split(self) -> Split:
        """The data of the clients, the common test set and the aggregator."""
        dataset = self.dataset()
        rule = self.partition_of(dataset)
        parts = split(
            dataset,
            rule,
            self.clients or (0 if parse_partition(rule)[0].by == "groups" else CLIENTS),
            self.seed,
            valid=self.valid,
            test=self.test,
            public_per_class=self.public,
        )
        if not self.public_file:
            return parts
        if parts.public is not None:
            raise Mistake(f"The partition {self.partition} already gives the aggregator rows: leave out public_file.")
        return replace(parts, public=public_file(self.public_file, parts.dataset))

    def build(
        self,
        workers: int | Literal["auto"] = 1,
        runtime: MakeSimulation | None = None,
        inspect: Callable[[Dataset], None] | None = None,
    ) -> tuple[Method, Simulation]:
        """The method and a simulation for it: in processes of this machine, or elsewhere with `runtime`.

        `inspect` is called with the data set after everything has been checked.
        """
        split, roles = self.split(), parse_roles(self.roles)
        dataset = split.dataset
        facts = row_facts(split, count=self.loss.startswith("class-weights"))
        method = self.make(**facts)
        model = self.model_of(tuple(dataset.x.shape[1:]), method.task.kind)
        check_reader(model, dataset.schema)
        try_run(method, self.method, model, split.clients, split.public, len(dataset.classes))
        if inspect is not None:
            inspect(dataset)
        options: SimulationOptions = {
            "bench": split.test,
            "public": split.public,
            "topology": self.topology or "star",
            "seed": self.seed,
            "workers": workers,
            "plain": self.plain,
            "device": self.device,
            "precision": self.precision,
            "faults": Missing(self.missing) if self.missing else None,
        }
        clients = roles.taking_part(split.clients)
        fed = runtime(self, clients, facts, options) if runtime else Simulation(clients, **options)
        fed.robust, fed.roles = self.robust, roles
        for node, statistics in split.statistics.items():
            fed.opening.letter(node, SERVER, wire.size(dict(statistics)))
            fed.opening.letter(SERVER, node, wire.size(dataset.preparation.plain() if dataset.preparation else None))
        for client in split.skipped():
            fed.opening.notice(client or SERVER, "read", SKIPPED)
        return method, fed

    def run(
        self,
        method: Method,
        fed: Runtime,
        store: Store,
        watch: Watch | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        extend: bool = False,
    ) -> Result:
        """Run all rounds, from the store's checkpoint if it has one. `extend`: the run may have fewer rounds so far."""
        settings = store.path("experiment.toml")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingTrained)  # it is raised below
            result = federate(
                method,
                fed,
                self.rounds,
                store=store,
                evaluate_every=self.evaluate_every,
                patience=self.patience,
                watch=watch,
                checkpoint_seconds=checkpoint_seconds,
                name=self.method,
                experiment=asdict(self),
                extend=(lambda: write(settings, self.write(settings))) if extend else None,
                info=self.model_info(method),
            )
        if result.summary.outcome != "trained":
            raise NothingTrained(nothing_trained(result.rounds))
        return result

    def make(
        self,
        shape: tuple[int, ...],
        classes: int,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        task: str = "",
        target: tuple[float, float] = (0.0, 1.0),
        class_counts: tuple[int, ...] = (),
        names: tuple[str, ...] = (),
        inputs: Sequence[PlainInput] = (),
    ) -> Method:
        """The method for rows of this shape."""
        facts = {"shape": shape, "classes": classes, "mean": mean, "std": std, "task": task, "target": target}
        kind = choose_kind(self.task, task, classes)
        kind.check(self.loss, self.metrics)
        known = TargetFacts(classes, *target, class_weights(class_counts), names)

        def net() -> torch.nn.Module:
            fresh = build_model(
                self.model_of(shape, kind.name), shape, kind.outputs(known, self.loss), Input.parse(inputs)
            )
            loaded = load_weights(fresh, self.weights) if self.weights else fresh
            return add_adapters(loaded, self.lora) if self.lora else loaded

        settings, plan = self._settings()
        method = find(self.method)
        personal = [pattern.strip() for pattern in self.personal.split(",") if pattern.strip()]
        check_use(self.method, kind.name, bool(personal))
        check_augmentation(self.augment, shape, kind.name, CLASSIFICATION)
        of_kind = kind.arguments(self.loss, self.metrics, known)
        learned = Task(net, mean=mean, std=std, personal=personal, augment=self.augment, **of_kind)
        needed = needed_inputs(self.model, inputs)
        learned.facts = facts | {"class_counts": class_counts, "names": names, "inputs": needed}
        server = parse_server(self.server)
        return method(task=learned, local=plan, cohort=self.cohort, server=server, **settings)

    def model_info(self, method: Method) -> ModelInfo:
        """How to build the network of this run's models."""
        plain = {name: value for name, value in asdict(self).items() if name in EXPERIMENT}
        facts: dict[str, Any] = dict(method.task.facts)
        names = facts.pop("names", ())
        chosen = {"task": method.task.kind, "model": self.model_of(tuple(facts["shape"]), method.task.kind)}
        return ModelInfo(plain | chosen, facts, [str(n) for n in names])


_names = [f.name for f in fields(Experiment)]
DATA_FIELDS = tuple(_names[_names.index("data") : _names.index("rows") + 1])  # everything that `dataset` depends on
