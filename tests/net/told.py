"""What a run says that must be the same wherever it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from place import Place

from kilter.federate import federate
from kilter.records.run_folder import Store


def simulate(here: Place, **options: Any) -> Path:
    """The run folder of the same experiment in simulation."""
    folder = here.folder / "simulated"
    store = Store(folder)
    with here.simulated(**options) as fed:
        federate(here.method(), fed, here.experiment["rounds"], store=store)
    store.close()
    return folder


def told(folder: Path) -> dict[str, Any]:
    """What a run says of every client, without what only a simulated client can know: the common test set."""
    reports = json.loads((folder / "clients.json").read_text())["last"]["clients"]
    return {
        name: {
            k: v
            for k, v in r.items()
            if v is not None and (r.get("own_bench") is None or k not in ("own_bench", "local", "common"))
        }
        for name, r in reports.items()
    }


def booked(folder: Path, relayed: bool = False) -> list[dict[str, Any]]:
    """What the books say that does not depend on the clock; sealed letters are a little longer, and a relay reads no tables."""
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    names = ("round", "loss", "steps", "participants", "failures", "notes", "notices", "series", "listens")
    names += ("bytes_up", "bytes_down", "bytes_by_node")
    return [{k: r[k] for k in names if not (relayed and ("bytes" in k or k in ("series", "listens")))} for r in rounds]
