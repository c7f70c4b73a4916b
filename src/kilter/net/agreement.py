"""What a server and its sites have agreed on: `run.json` in the run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kilter.data.preparation import AnyPreparation, parse_preparation
from kilter.errors import Mistake
from kilter.net.data_description import DataDescription
from kilter.net.versions import Steps, upgraded
from kilter.records.wire import Malformed

FILE = "run.json"
VERSION = 2
UPGRADES: Steps = {1: lambda plain: {"preparation": None, **plain}}  # release 0.1 prepared no data


@dataclass(frozen=True)
class Agreement:
    """Which run this is, who takes part, what a row looks like and how it is prepared: decided once, kept in the run folder."""

    run: str
    sites: list[str]
    description: DataDescription
    preparation: AnyPreparation | None = None  # None: not needed, or not fitted yet

    def text(self) -> str:
        preparation = None if self.preparation is None else self.preparation.plain()
        plain = {
            "version": VERSION,
            "run": self.run,
            "sites": self.sites,
            "data": self.description.plain(),
            "preparation": preparation,
        }
        return json.dumps(plain, indent=2)

    @staticmethod
    def read(path: Path) -> Agreement:
        try:
            plain = upgraded(dict(json.loads(path.read_text())), VERSION, UPGRADES, path)
            known = plain["preparation"]
            preparation = None if known is None else parse_preparation(known)
            sites = [str(name) for name in plain["sites"]]  # type: ignore[attr-defined]
            return Agreement(str(plain["run"]), sites, DataDescription.parse(plain["data"]), preparation)
        except (OSError, ValueError, LookupError, TypeError, Malformed):
            raise Mistake(f"'{path}' is damaged: choose another --out to start a new run.") from None
