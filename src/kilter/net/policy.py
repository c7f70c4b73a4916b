"""What may happen at a site: deny by default. A file `site.toml` states it; without one, a safe built-in policy applies.

The policy is checked three times: against the terms of a run before anything is built, against every fit before it trains, and
against every evaluation before its results leave. docs/hospital.md explains the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import torch

from kilter.core import DISCLOSURES, Data, Fit, Method, Rows, Tree
from kilter.data.row_facts import RowFacts, check_reader
from kilter.data.split import some_of
from kilter.errors import Mistake, unknown
from kilter.experiment import Experiment
from kilter.methods import find, methods
from kilter.metrics import is_of_one_class
from kilter.models import MODELS
from kilter.models import build as build_model
from kilter.models.inputs import Input
from kilter.models.pretrained import is_pretrained_spec
from kilter.net.results import METRICS, SHARES
from kilter.net.terms import Terms, file_digest
from kilter.plugins import is_file_spec
from kilter.records.toml_file import read_toml
from kilter.runtimes.step_names import EVALUATE, StepName
from kilter.runtimes.step_runner import resolve
from kilter.tasks.kinds import BY_CLASS

SAFE_KINDS = frozenset(
    {"model", "density", "sums", "counts", "label_counts", "means", "pictures", "opinions", "shares", "statistics"}
)


class PolicyViolation(Mistake):
    """The site's policy forbids this. The owner of the site can change the policy file; nobody else can."""


@dataclass(frozen=True)
class Bounds:
    """A range of numbers, both ends included."""

    at_least: float = -math.inf
    at_most: float = math.inf

    def check(self, what: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.at_least <= value <= self.at_most:
            shown = f"{value!r}"[:40]
            raise PolicyViolation(
                f"This site's policy allows {what} from {self.at_least:g} to {self.at_most:g}, and the run wants {shown}."
            )

    @staticmethod
    def read(value: object, where: str) -> Bounds:
        numbers = value if isinstance(value, dict) else {}
        wrong = set(numbers) - {"at_least", "at_most"}
        if not isinstance(value, dict) or wrong or not all(isinstance(v, int | float) for v in numbers.values()):
            raise Mistake(f"{where} of the policy takes a range such as {{ at_least = 0, at_most = 1 }}.")
        return Bounds(**{k: float(v) for k, v in numbers.items()})


Settings = Mapping[str, Bounds]


def built_in_methods() -> dict[str, Settings]:
    """The methods of the built-in policy: those that come with kilter and send only SAFE_KINDS."""
    return {
        name: {"mash": Bounds(8)} if name == "fedmix" else {}
        for name, kind in sorted(methods().items())
        if kind.__module__.startswith("kilter.methods.") and kind.sends <= SAFE_KINDS
    }


@dataclass(frozen=True)
class SitePolicy:
    """What a site allows. The defaults are the built-in policy."""

    methods: Mapping[str, Settings] = field(default_factory=built_in_methods)  # by name, with bounds of their settings
    sends: frozenset[str] = SAFE_KINDS  # what may leave (kilter.core.DISCLOSURES)
    steps: frozenset[str] = frozenset()  # steps that may run; none: every step of an allowed method
    models: frozenset[str] = frozenset(MODELS)
    parameters: int = 50_000_000  # most weights in a model
    lr: Bounds = Bounds(0.0, 1.0)
    epochs: Bounds = Bounds(1, 200)
    batch: Bounds = Bounds(8, 100_000)  # rows in a step of training; 0 (all rows) is always allowed
    rounds: Bounds = Bounds(1, 10_000)
    valid: Bounds = Bounds(0.0, 0.5)  # share of the rows kept for validation
    rows: int = 16  # fewest training rows with which this site takes part
    rows_per_fit: int = 16  # fewest rows in any fit
    evaluation: frozenset[str] = frozenset({*METRICS, *SHARES} - {"local"})  # evaluation results that may leave
    evaluation_rows: int = 5  # fewest rows behind an evaluation result
    statistics_rows: int = 5  # fewest rows behind a mean or a category value that leaves before training
    sealed: bool = False  # only runs in which the server cannot read what sites write to each other
    aggregate: bool = True  # whether this site aggregates when its turn comes, and so sees what other sites send
    approval: Literal["person", "policy"] = "person"  # who approves terms: somebody by digest, or this policy alone
    memory_mb: int = 8_000  # most memory of the process; 0: no limit
    processes: int = (
        2  # most other programs that the process may start; training starts none, a GPU one to ask it for its memory
    )
    seconds_per_step: float = 3_600.0
    state_mb: int = 4_000  # most disk space of what the method keeps at this site
    files: tuple[
        str, ...
    ] = ()  # the site's own file.py:Name (--trust), used in place of the server's file of that name
    weights: str = ""  # the site's copy of the pre-trained weights (--weights)

    @staticmethod
    def read(path: Path | None) -> SitePolicy:
        """From site.toml; what the file leaves out has the built-in value."""
        policy = SitePolicy()
        if path is None:
            return policy
        known = {f.name: f for f in fields(SitePolicy) if f.name not in ("files", "weights")}
        values: dict[str, object] = {}
        for key, value in read_toml(path).items():
            if key not in known:
                raise unknown("field of the policy", key, known)
            values[key] = _read_field(key, value, getattr(policy, key))
        return replace(policy, **values)  # type: ignore[arg-type]

    # The terms of a run ---------------------------------------------------------------------------------------------

    def admit(self, terms: Terms, rows: int, facts: RowFacts) -> tuple[Experiment, Method]:
        """The experiment and method of these terms, or a PolicyViolation that says what this site does not allow.

        Before the preparation of the data is known, the site passes one of its own, which decides nothing later.
        """
        plain = dict(terms.experiment)
        name = str(plain.get("method"))
        short = Path(name).name if is_file_spec(name) else name
        plain["method"], plain["model"] = self._own(name), self._own(str(plain.get("model")))
        plain["optimiser"] = self._own(str(plain.get("optimiser", "sgd")))
        if short not in self.methods and not is_file_spec(name):  # files were named with --trust
            raise PolicyViolation(
                f"The server wants to run '{short}', and this site only allows {_list(self.methods)}."
            )
        if terms.weights:
            if not self.weights or file_digest(self.weights) != terms.weights:
                raise Mistake(
                    "The run starts from pre-trained weights: give this site's copy of that file (--weights)."
                )
            plain["weights"] = self.weights
        for what, bounds in (("valid", self.valid), ("rounds", self.rounds), ("seed", Bounds(0, 2**63))):
            bounds.check(what, plain.get(what))
        experiment = Experiment.of(plain)
        self._check_training(experiment, self.methods.get(short, {}))
        self._check_rows(experiment, rows)
        self._check_model(experiment, facts)
        check_reader(experiment.model_of(facts["shape"], facts["task"]), terms.description.schema)
        if self.sealed and not terms.sealed:
            raise PolicyViolation("This site's policy requires sealed letters, and in this run the server reads them.")
        method = experiment.make(**facts)
        if terms.frozen and method.task.frozen_digest() != terms.frozen:
            raise Mistake("The frozen weights here differ from those of the terms: use the same model and --weights.")
        self._check_disclosures(method.discloses() | terms.discloses(), short)
        if terms.description.needs_statistics and "statistics" not in self.sends:
            raise PolicyViolation(
                f"The run wants {DISCLOSURES['statistics']}, which this site's policy does not allow."
            )
        return experiment, method

    def _own(self, spec: str) -> str:
        """A registered name as it stands; a file only if this site named it."""
        if not is_file_spec(spec):
            return spec
        for mine in self.files:
            if Path(mine).name == Path(spec).name:
                return mine
        name = Path(spec).name
        raise PolicyViolation(f"The server wants '{name}', a file: get it, read it, and allow it with --trust {name}.")

    def _check_training(self, experiment: Experiment, settings: Settings) -> None:
        plan = experiment.local
        self.lr.check("lr", plan["lr"])
        self.epochs.check("epochs", plan["epochs"])
        if plan["batch"] != 0:
            self.batch.check("batch", plan["batch"])
        for name, value in experiment.settings.items():
            if name in settings:
                settings[name].check(name, value)
            elif name.endswith("epochs"):
                Bounds(0, self.epochs.at_most).check(name, value)
            elif name.endswith("lr"):
                self.lr.check(name, value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                Bounds(-1e6, 1e6).check(name, value)

    def _check_rows(self, experiment: Experiment, rows: int) -> None:
        left = rows - some_of(rows, experiment.valid)
        if left < self.rows:
            raise PolicyViolation(
                f"With valid={experiment.valid:g} this site would train on {left} rows, and its policy wants {self.rows}."
            )

    def _check_model(self, experiment: Experiment, facts: RowFacts) -> None:
        model = experiment.model_of(facts["shape"], facts["task"])
        name = model.split(":")[0]
        if not is_file_spec(experiment.model) and name not in self.models:
            raise PolicyViolation(
                f"The server wants the model '{name}', and this site only allows {_list(self.models)}."
            )
        if not is_file_spec(experiment.model) and not is_pretrained_spec(experiment.model):
            with torch.device("meta"):  # counts the weights without allocating them
                net = build_model(model, facts["shape"], facts["classes"], Input.parse(facts["inputs"]))
            size = sum(p.numel() for p in net.parameters())
            if size > self.parameters:
                raise PolicyViolation(
                    f"The model '{experiment.model}' has {size} weights, and this site allows {self.parameters}."
                )

    def _check_disclosures(self, kinds: frozenset[str], name: str) -> None:
        forbidden = sorted(kinds - self.sends)
        if forbidden:
            what = " and ".join(DISCLOSURES.get(kind, kind) for kind in forbidden)
            raise PolicyViolation(f"'{name}' sends {what}, which this site's policy does not allow.")

    # While a run goes on --------------------------------------------------------------------------------------------

    def check_step(self, method: Method, step: StepName) -> None:
        """Only steps of the method, and only those that the policy lists, if it lists any."""
        resolve(method, step)
        if self.steps and str(step) not in self.steps and step.step not in self.steps:
            raise PolicyViolation(f"The step '{step}' is not allowed at this site.")

    def check_fit(self, fit: Fit) -> None:
        """Every fit before it trains: rows, plan and size."""
        if len(fit.rows) < self.rows_per_fit:
            raise PolicyViolation(f"A fit on {len(fit.rows)} rows: this site's policy wants {self.rows_per_fit}.")
        self.lr.check("lr", fit.plan.lr)
        Bounds(0, self.epochs.at_most).check("epochs", fit.plan.epochs)
        if fit.plan.batch != 0 and fit.plan.batch < len(fit.rows):
            self.batch.check("batch", fit.plan.batch)
        size = sum(v.numel() for v in fit.params.values())
        if size > self.parameters:
            raise PolicyViolation(f"A fit of {size} weights: this site allows {self.parameters}.")

    def filter_report(self, step: StepName, report: Tree, data: Data) -> Tree:
        """An evaluation report as it may leave: allowed parts with enough rows behind them; the others become None."""
        if step != EVALUATE or not isinstance(report, dict):
            return report
        kept = dict(report)
        for part in (*METRICS, *SHARES):
            behind = report.get("n_valid" if part.endswith("valid") else "n_test", 0)
            few = part in METRICS and part != "own_bench" and behind < self.evaluation_rows
            if part in kept and (part not in self.evaluation or few):
                kept[part] = None
            elif isinstance(kept.get(part), dict) and any(map(is_of_one_class, kept[part])):
                rows = {"own_bench": None}.get(part, data.valid if part.endswith("valid") else data.test)
                kept[part] = self._filter_classes(kept[part], rows)
        return kept

    def _filter_classes(self, metrics: Mapping[str, Tree], rows: Rows | None) -> dict[str, Tree]:
        """Metrics of single classes become None if they may not leave, or if too few of these rows have the class."""
        classes = list(dict.fromkeys(name.partition(":")[2] for name in metrics if is_of_one_class(name)))
        counts = None if rows is None else torch.bincount(rows["y"].cpu(), minlength=len(classes)).tolist()

        def may_leave(name: str) -> bool:
            if not is_of_one_class(name):
                return True
            enough = counts is None or counts[classes.index(name.partition(":")[2])] >= self.evaluation_rows
            return BY_CLASS in self.evaluation and enough

        return {name: value if may_leave(name) else None for name, value in metrics.items()}


def _list(names: object) -> str:
    return ", ".join(sorted(names)) if isinstance(names, Mapping | frozenset) and names else "nothing"


def _read_field(key: str, value: object, default: object) -> object:
    """One field of site.toml, with the type of its default."""
    if key == "methods":
        return _read_methods(value)
    if isinstance(default, Bounds):
        return Bounds.read(value, key)
    if isinstance(default, frozenset):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise Mistake(f"{key} of the policy is a list of names.")
        known = {"sends": tuple(DISCLOSURES), "models": tuple(MODELS), "evaluation": (*METRICS, *SHARES, BY_CLASS)}.get(
            key
        )
        for name in value:
            if known and name not in known:
                raise unknown(f"entry of {key}", name, known)
        return frozenset(value)
    if key == "approval" and value not in ("person", "policy"):
        raise unknown("approval", str(value), ("person", "policy"))
    if isinstance(default, bool) is not isinstance(value, bool) or (
        isinstance(default, float | int) and (not isinstance(value, int | float) or value < 0)
    ):
        raise Mistake(f"{key} of the policy takes {'true or false' if isinstance(default, bool) else 'a number'}.")
    return value


def _read_methods(value: object) -> dict[str, Settings]:
    if isinstance(value, list):
        value = {name: {} for name in value}
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise Mistake(
            "methods of the policy is a list of names, or a table such as fedprox = { mu = { at_most = 1 } }."
        )
    for name in value:
        if not is_file_spec(name):
            find(name)
    return {name: {k: Bounds.read(v, f"methods.{name}.{k}") for k, v in each.items()} for name, each in value.items()}


def narrowed(policy: SitePolicy, allowed: Sequence[str], steps: Sequence[str]) -> SitePolicy:
    """The policy with the methods and steps of the command line (`--allow-methods`, `--allow-steps`)."""
    if allowed:
        policy = replace(policy, methods={name: policy.methods.get(name, {}) for name in allowed})
    return replace(policy, steps=frozenset(steps)) if steps else policy
