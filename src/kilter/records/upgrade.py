"""Records of format 1, which had no format field, as records of today's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kilter.records.types import Checkpoint, Clients, Partition, Round, Summary

Values = Mapping[str, Any]
PERSONAL = "the mean over the clients' own models"  # how format 1 said that there is no global model
NESTED = ("per_class", "confusion")


Kind = type[Round] | type[Summary] | type[Clients] | type[Checkpoint] | type[Partition]


def upgrade(kind: Kind, old: Values) -> dict[str, Any]:
    """A record of format 1 as one of today. Format 1 had no partitions."""
    return {Round: _round, Summary: _summary, Clients: _clients, Checkpoint: _checkpoint}[kind](old)


def _round(old: Values) -> dict[str, Any]:
    new = {k: v for k, v in old.items() if k not in ("global", "client", "bench", "notes")}
    new |= {"global_metrics": old["global"], "client": old["client"] or {}, "bench": old.get("bench") or {}}
    new["replies"] = len(old["participants"])
    return new | _notes(old["round"], old.get("notes", []))


def _notes(round: int, old: list[Values]) -> dict[str, Any]:
    """Format 1 kept sentences and tables in one list. A table's numbers are points of series by their names."""
    new: dict[str, Any] = {"notes": [], "series": [], "listens": {}}
    for entry in old:
        node, step, note = entry["node"], entry["step"], entry["note"]
        if isinstance(note, str):
            new["notes"].append({"node": node, "step": step, "text": note})
            continue
        if "listens" in note:
            new["listens"][node] = note["listens"]
        at = note.get("density_round", round)  # the only series of format 1 that counted anything but rounds
        for name, value in note.items():
            if isinstance(value, int | float) and name != "density_round":
                new["series"].append({"series": name, "node": node, "at": at, "value": value})
    return new


def _scores(old: Values | None) -> dict[str, Any] | None:
    if not old:
        return None
    return {"metrics": {k: v for k, v in old.items() if k not in NESTED}} | {k: old[k] for k in NESTED if k in old}


def _evaluation(old: Values, global_model: str) -> dict[str, Any]:
    return {
        "round": old["round"],
        "global_model": global_model,
        "scores": _scores(old["global"]),
        "client": old.get("client") or {},
        "bench": old.get("bench") or {},
        "valid": old["valid"],
        "variants": {name: _scores(scores) for name, scores in old.get("variants", {}).items()},
    }


def _global_model(old: Values) -> str:
    return "mean of personal models" if old["global_is"] == PERSONAL else "global"


def _summary(old: Values) -> dict[str, Any]:
    renamed = ("global_is", "client_is", "last", "best")
    model = _global_model(old)
    return {k: v for k, v in old.items() if k not in renamed} | {
        "global_model": model,
        "client_model": "personal" if old["client_is"].startswith("each client's own") else "received",
        "last": _evaluation(old["last"], model),
        "best": _evaluation(old["best"], model) if "round" in old["best"] else None,
        "chosen_by": "accuracy" if "accuracy" in (old["best"].get("valid") or {"accuracy"}) else "loss",
    }


def _clients(old: Values) -> dict[str, Any]:
    return dict(old)


def _checkpoint(old: Values) -> dict[str, Any]:
    def evaluated(report: Values | None) -> dict[str, Any] | None:
        if not report:
            return None
        return {"evaluation": _evaluation(report, _global_model(report)), "reports": report["clients"]}

    score = old["best"]["score"] if old["best"] else None
    kept = {k: old[k] for k in ("round", "stale", "stopped", "seconds")}
    return kept | {"last": evaluated(old["last"]), "best": evaluated(old["best"]), "score": score}
