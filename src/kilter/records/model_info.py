"""model.toml: what is needed to use a saved model without the run and its data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from kilter.errors import Mistake
from kilter.records.versions import versions

FILE = "model.toml"
LAST, BEST, FROZEN, CARD = "model.safetensors", "best.safetensors", "frozen.safetensors", "README.md"
PERSONAL = "personal"  # the folder of the clients' own models
FORMAT = 1
EXPERIMENT = (
    "method",
    "model",
    "weights",
    "lora",
    "personal",
    "task",
    "loss",
    "metrics",
    "optimiser",
    "local",
    "seed",
    "rounds",
)


@dataclass(frozen=True)
class ModelInfo:
    """How to build the network, and what its inputs and outputs are."""

    experiment: dict[str, object]  # the fields in EXPERIMENT, with the task that was learned
    facts: dict[str, object]  # of the rows: kilter.experiment.RowFacts
    classes: list[str]
    versions: dict[str, str] = field(default_factory=versions)

    def text(self) -> str:
        """The text of model.toml."""
        facts = {name: value for name, value in self.facts.items() if value is not None}
        return tomli_w.dumps(
            {
                "format": FORMAT,
                "classes": list(self.classes),
                "experiment": self.experiment,
                "facts": facts,
                "versions": self.versions,
            }
        )

    @staticmethod
    def read(folder: Path) -> ModelInfo:
        """From the folder of a run or of a site's model."""
        try:
            plain = tomllib.loads((folder / FILE).read_text())
            if plain["format"] != FORMAT:
                raise Mistake(f"'{folder / FILE}' was written by another version of kilter: upgrade.")
            experiment, facts = _table(plain, "experiment"), _table(plain, "facts")
            return ModelInfo(
                experiment,
                facts,
                [str(c) for c in plain["classes"]],
                {str(k): str(v) for k, v in _table(plain, "versions").items()},
            )
        except OSError:
            raise Mistake(f"'{folder}' holds no model: it has no {FILE}.") from None
        except (ValueError, LookupError, TypeError):
            raise Mistake(f"'{folder / FILE}' cannot be read: restore it from a backup, or run again.") from None


def _table(plain: Mapping[str, object], name: str) -> dict[str, object]:
    table = plain[name]
    if not isinstance(table, dict):
        raise TypeError
    return table
