"""What the leader of a turn reports: the record of each round, and at the end all records and the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from kilter.net.links import Links
from kilter.net.turns import Turn, TurnMessage
from kilter.records.codec import to_json
from kilter.records.run_folder import read_rounds, read_summary
from kilter.records.types import Round

Report = Callable[[str, str], None]  # takes "record", "records" or "result", and JSON


class RunReports:
    """With a relay, `report` tells the relay. Without one, it writes to this site's run folder, and the others are told, too."""

    def __init__(self, links: Links, ids: Sequence[str], report: Report, relay: bool) -> None:
        self.links, self.relay, self._ids, self._report = links, relay, ids, report

    def receive(self, kind: str, body: bytes) -> None:
        """Another site reports."""
        self._report(kind, body.decode(errors="replace"))

    def record(self, turn: Turn, record: Round) -> None:
        self._tell("record", turn, to_json(record))

    def end(self, turn: Turn, folder: Path) -> None:
        """The run is over; its records and its result are in this folder."""
        self._tell("records", turn, "\n".join(map(to_json, read_rounds(folder))))
        self._tell("result", turn, to_json(read_summary(folder)))
        if not self.relay:
            self._send_all(TurnMessage("over", turn))

    def leading(self, turn: Turn) -> None:
        """This site leads, and makes progress."""
        self._send_all(TurnMessage("leading", turn))

    def _tell(self, kind: Literal["record", "records", "result"], turn: Turn, text: str) -> None:
        self._report(kind, text)
        if not self.relay:
            self._send_all(TurnMessage(kind, turn), text.encode())

    def _send_all(self, message: TurnMessage, body: bytes = b"") -> None:
        for name in self._ids:
            self.links.send(name, message.head(), body)
