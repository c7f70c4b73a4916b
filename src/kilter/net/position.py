"""Where a site stands in a rotating federation: a small file that survives a restart."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from kilter.errors import Mistake
from kilter.net.turns import NOBODY, Turn
from kilter.records.run_folder import write

FILE = "position.json"
Phase = Literal[
    "member",  # follows others
    "leading",  # leads `turn`
    "finished",  # has led `turn` and waits to be released by `previous`
    "holding",  # holds the state after `turn` and is responsible for the next round
    "over",  # has led the last round
]


@dataclass(frozen=True)
class Position:
    """The turn that this site knows of, leads, or has led."""

    turn: Turn = NOBODY
    phase: Phase = "member"
    previous: str = ""  # who appointed this site; empty: nobody
    folder: str = ""  # the run folder of this turn
    attempt: int = 0  # holding: at the next round
    appointed: str = ""  # holding: who leads the next round

    @property
    def next_turn(self) -> Turn:
        """The turn that a holder appoints a leader for."""
        return Turn(self.turn.round + 1, self.attempt)

    def write(self, folder: Path) -> None:
        write(folder / FILE, json.dumps(asdict(self)))

    def clean(self, folder: Path) -> None:
        """Remove the run folders of other turns."""
        for other in folder.glob("turn-*"):
            if other.name != self.folder:
                shutil.rmtree(other, ignore_errors=True)

    @staticmethod
    def read(folder: Path) -> Position:
        path = folder / FILE
        if not path.exists():
            return Position()
        try:
            plain = json.loads(path.read_text())
            position = Position(**{**plain, "turn": Turn(*map(int, plain["turn"]))})
            if position.phase not in get_args(Phase):
                raise ValueError
            return position
        except (OSError, ValueError, TypeError, LookupError):
            raise Mistake(f"'{path}' is damaged: restore the state directory, or use a new one.") from None
