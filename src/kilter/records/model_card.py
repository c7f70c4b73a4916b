"""A model card in the layout of Hugging Face: what was trained, on whose data, with which results and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kilter.records.display import metric, size
from kilter.records.model_info import ModelInfo
from kilter.records.notices import describe
from kilter.records.types import ClientReport, Partition, Summary

SHOWN = ("method", "model", "task", "loss", "optimiser", "rounds", "seed")
LIMITS = (
    "The model was tested on rows of the clients that took part. Evaluate it on your own data before you use it "
    "(`kilter evaluate`)."
)


def data_lines(partition: Partition | None) -> list[str]:
    """The rows of each class of every client, or statistics of its targets, where a simulation knows them."""
    if partition is None:
        return []
    if partition.targets:
        names = list(next(iter(partition.targets.values())))
        return _table(names, {c: [f"{v:.4g}" for v in line.values()] for c, line in partition.targets.items()})
    classes = len(next(iter(partition.clients.values()), []))
    names = partition.classes[:classes] or [f"class {k}" for k in range(classes)]
    if classes > 20:
        return [f"- {client}: {sum(counts)} rows" for client, counts in partition.clients.items()]
    return _table(names, partition.clients)


def _table(names: Sequence[str], clients: Mapping[str, Sequence[object]]) -> list[str]:
    return [
        f"| client | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
        *(f"| {client} | {' | '.join(map(str, cells))} |" for client, cells in clients.items()),
    ]


def _settings(info: ModelInfo) -> list[str]:
    shown = [f"| {name} | {info.experiment[name]} |" for name in SHOWN if info.experiment.get(name) not in (None, "")]
    local = info.experiment.get("local")
    if isinstance(local, Mapping):
        plan = ", ".join(f"{k}={v}" for k, v in local.items() if k in ("lr", "epochs", "batch"))
        shown.append(f"| training | {plan} |")
    return shown


def model_card(
    info: ModelInfo,
    summary: Summary,
    clients: Mapping[str, ClientReport],
    data: Sequence[str] = (),
) -> str:
    """The text of README.md. `data` are lines about the data of each client, where they are known."""
    main = summary.chosen_by
    overall = summary.last.scores.metrics if summary.last.scores else {}
    lines = [
        "---",
        "library_name: kilter",
        "tags: [federated-learning, kilter]",
        "---",
        "",
        f"# {info.experiment.get('model')} trained with {summary.method}",
        "",
        f"Trained by {summary.clients} clients in {summary.rounds} rounds of federated learning.",
        "",
        "## Settings",
        "",
        "| setting | value |",
        "|---|---|",
        *_settings(info),
        "",
        "## Inputs and outputs",
        "",
        f"A row has the shape {info.facts.get('shape')}. Outputs: {', '.join(info.classes[:20])}"
        f"{' ...' if len(info.classes) > 20 else ''}. Tables are prepared with `preparation.toml`.",
        "",
        "## Data",
        "",
        *(data or ["The card does not describe the data: it stays at the clients."]),
        "",
        "## Results",
        "",
        *(f"- {name}: {metric(name, value)}" for name, value in overall.items()),
        "",
        f"Each client on its own test rows ({main}):",
        "",
        "| client | test rows | result |",
        "|---|---|---|",
        *(
            f"| {name} | {r.n_test} | {metric(main, (r.own_test or r.test or {}).get(main))} |"
            for name, r in clients.items()
        ),
        "",
        "## Limits",
        "",
        LIMITS,
        *(f"- {describe(notice)}" for notice in summary.notices),
        "",
        "## Traffic",
        "",
        f"{size(summary.bytes_up)} up, {size(summary.bytes_down)} down; {summary.seconds:.0f} s.",
        "",
    ]
    return "\n".join(lines)
