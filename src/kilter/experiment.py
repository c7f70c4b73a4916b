"""An experiment: everything that determines the results of a run. It comes from a TOML file, the command line or Python."""

from __future__ import annotations

import platform
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import tomli_w
import torch

import kilter
from kilter.core import SERVER, Data, Method, Rows
from kilter.data import DATASETS, Dataset, Split, TableOptions, load, split
from kilter.data.catalog import GROUPED
from kilter.data.partition_rules import parse as parse_partition
from kilter.data.preparation import read_schema
from kilter.data.split import public_file
from kilter.errors import Mistake, unknown
from kilter.federate import CHECKPOINT_SECONDS, NothingTrained, Result, Watch, federate
from kilter.methods import find
from kilter.models import build as build_model
from kilter.models import load_weights
from kilter.options import check, check_values, fill, option, own_fields
from kilter.plugins import is_file_spec
from kilter.records import wire
from kilter.records.notices import nothing_trained
from kilter.records.run_folder import Store, write
from kilter.runtimes.base import Runtime
from kilter.runtimes.robust import parse as parse_robust
from kilter.runtimes.simulation import Fault, Missing, Simulation
from kilter.runtimes.trial import smallest_batch, try_method, try_model
from kilter.seeds import numpy_generator
from kilter.tasks import Task
from kilter.topology import topology
from kilter.train import PLANS, Plan


class RowFacts(TypedDict):
    """What a method needs to know about the rows."""

    shape: tuple[int, ...]  # of one sample
    classes: int
    mean: tuple[float, ...] | None  # by channel
    std: tuple[float, ...] | None


class SimulationOptions(TypedDict):
    """The keyword arguments of Simulation that an experiment sets."""

    bench: Rows | None
    public: Rows | None
    topology: str
    seed: int
    workers: int | Literal["auto"]
    plain: bool
    device: str
    precision: str
    faults: Fault | None


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
    label: str = option("", "Column of the labels in your table; default: label or y.")
    client: str = option("", "Column of the clients in your table; default: client or group, if there is one.")
    drop: str = option("", "Columns of your table to leave out, separated by commas.")
    test_file: str = option("", "A table with the test rows of your table.")
    test_size: float = option(0.0, "Share of your table's rows used for test; 0: one row in five.", at_least=0, below=1)
    text: str = option("", "Columns of your table that hold free text, separated by commas.")
    tokenizer: str = option("", "A tokenizer file (Hugging Face tokenizers) for these texts; default: words.")
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
    public: int = option(
        0, "Rows of each class that the aggregator holds; default: 5 if the method needs some.", at_least=0
    )
    public_file: str = option("", "A file with the aggregator's rows, instead of --public.")
    model: str = option(
        "auto",
        "A model listed by `kilter models`, or my_model.py:Net; auto: mlp for tables, cnn or resnet18 for images.",
    )
    weights: str = option("", "Pre-trained weights: a .safetensors or .pt file.")
    optimiser: Literal["sgd", "adam"] = option("sgd", "Optimiser of the clients.")
    local: dict[str, Any] = option({}, "The optimiser's settings (on the command line: --lr 0.01 ...).")
    rounds: int = option(20, "Number of rounds.", at_least=1)
    cohort: float = option(1.0, "Share of the clients that take part in a round.", above=0, at_most=1)
    topology: str = option(
        "",
        "A topology listed by `kilter topologies`, such as ring or regular:4; default: star, or full if the method needs it.",
    )
    robust: str = option("", "Defence against malicious clients: clip:1, median, trimmed:0.2 or krum:0.2.")
    missing: float = option(0.0, "Probability that a client does not answer a call (simulated).", at_least=0, below=1)
    seed: int = option(0, "Seed of every random choice.", at_least=0)
    evaluate_every: int = option(1, "Rounds between evaluations; the last round is always evaluated.", at_least=1)
    plain: bool = option(False, "Simulate without accelerated code: slower, and other last bits.")
    device: str = option("cpu", "Device of the simulation: cpu, cuda, cuda:1, mps, xpu; auto: the best there is.")
    precision: Literal["fp32", "bf16", "fp16"] = option("fp32", "Precision of layers; parameters stay float32.")
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
        settings, plan = self._settings()
        chosen = self.topology or ("full" if "everyone" in find(self.method).needs else "star")
        if not chosen.startswith("edges:"):  # with as many clients as the data names, only the name can be checked
            topology(chosen, [str(k) for k in range(self.clients or 50)], self.seed)
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
        kind, planned = find(self.method), PLANS[self.optimiser]
        own, plan_names = own_fields(kind, Method), {f.name for f in fields(planned)}
        for name in self.settings:
            if name not in own and name not in plan_names:
                if not own:
                    raise Mistake(f"The method {self.method} has no settings of its own, but '{name}' was given.")
                raise unknown(f"setting of {self.method}", name, own)
        of_method = {k: v for k, v in self.settings.items() if k in own}
        of_plan = {k: v for k, v in self.settings.items() if k not in own}
        plan = planned(**fill(planned, {**self.local, **of_plan}, f"{self.optimiser} optimiser"))
        settings = fill(kind, of_method, f"method {self.method}", own)
        check_values(own.values(), settings, kind.__name__)
        return settings, plan

    def write(self) -> str:
        """The text of a TOML file that repeats the run."""
        return tomli_w.dumps({**asdict(self), "versions": versions()})

    # Building ------------------------------------------------------------------------------------------------------

    def table_options(self) -> TableOptions:
        """How to read a user's table."""
        drop, text = (tuple(filter(None, map(str.strip, names.split(",")))) for names in (self.drop, self.text))
        return TableOptions(
            self.label,
            self.client,
            drop,
            self.test_file,
            self.test_size,
            text,
            self.tokenizer,
            self.prepare,
            self.image_size,
            self.image_mode,
        )

    def dataset(self) -> Dataset:
        """The data set, with at most `rows` training rows."""
        options = self.table_options()
        schema = read_schema(self.schema) if self.schema else None
        whole = load(self.data, schema=schema, table=options, prepare=False)
        if self.data in DATASETS and (self.schema or options != TableOptions()):
            raise Mistake(f"'{self.data}' is not data of yours: leave out label, client, schema and the like.")
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
        split = self.split()
        dataset = split.dataset
        facts: RowFacts = {
            "shape": tuple(dataset.x.shape[1:]),
            "classes": len(dataset.classes),
            "mean": dataset.mean,
            "std": dataset.std,
        }
        method = self.make(**facts)
        self._try(method, split)
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
        fed = runtime(self, split.clients, facts, options) if runtime else Simulation(split.clients, **options)
        fed.robust = self.robust
        for node, statistics in split.statistics.items():
            fed.opening.letter(node, SERVER, wire.size(dict(statistics)))
            fed.opening.letter(SERVER, node, wire.size(dataset.preparation.plain() if dataset.preparation else None))
        return method, fed

    def _try(self, method: Method, split: Split) -> None:
        """Try a user's model and method, and batches of one row, before a run starts."""
        if is_file_spec(self.model) or smallest_batch(split.clients, method.local)[1] == 1:
            try_model(method.task, self.model, split.clients, method.local, len(split.dataset.classes))
        if is_file_spec(self.method):
            try_method(method, self.method, split.clients, split.public)

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
                extend=(lambda: write(store.path("experiment.toml"), self.write())) if extend else None,
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
    ) -> Method:
        """The method for rows of this shape."""

        def net() -> torch.nn.Module:
            fresh = build_model(self.model, shape, classes)
            return load_weights(fresh, self.weights) if self.weights else fresh

        settings, plan = self._settings()
        return find(self.method)(task=Task(net, mean=mean, std=std), local=plan, cohort=self.cohort, **settings)


_names = [f.name for f in fields(Experiment)]
DATA_FIELDS = tuple(_names[_names.index("data") : _names.index("rows") + 1])  # everything that `dataset` depends on


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. A Mistake says what is wrong with it."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise Mistake(f"'{path}' cannot be read: {e.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise Mistake(f"'{path}' is not a TOML file: {e}.") from None


def versions() -> dict[str, str]:
    """The versions of the software, for the record of a run."""
    packages = {name: version(name) for name in ("kilter", "torch", "numpy", "scikit-learn")}
    return {"python": platform.python_version(), **packages, "commit": commit(), "cpu": cpu()}


@cache
def cpu() -> str:
    """The processor and the instruction set that torch uses on it: float results depend on it."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def commit() -> str:
    """The commit of the code when this process started, and whether there were uncommitted changes."""
    home = Path(kilter.__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(home), *words], capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--", str(home))
    except (OSError, subprocess.SubprocessError):
        head = changed = ""
    return (head + (" with changes not committed" if changed else "")) if head else "unknown (not a git checkout)"
