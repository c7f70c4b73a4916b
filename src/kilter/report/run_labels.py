"""Names for single runs of one method: runs that differ in more than their seed are not averaged, but named by what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Settings that do not change what a line of a comparison is about.
ASIDE = ("seed", "method", "data", "partition", "name", "versions", "device", "evaluate_every")
LONGEST = 24  # characters of a value in a name


def flat(settings: Mapping[str, object]) -> dict[str, str]:
    """The settings of a run as texts by name; those of its method and of its training have their own names.

    >>> flat({"seed": 1, "rounds": 3, "local": {"lr": 0.1}})
    {'rounds': '3', 'lr': '0.1'}
    """
    values: dict[str, str] = {}
    for name, value in settings.items():
        if name in ("settings", "local") and isinstance(value, Mapping):
            values |= {key: str(part) for key, part in value.items()}
        elif name not in ASIDE:
            values[name] = str(value)
    return values


def distinguish(method: str, runs: Sequence[Mapping[str, object]]) -> list[str]:
    """A name for each run of a method, from the settings in which these runs differ.

    >>> distinguish("fedavg", [{"seed": 0, "rounds": 3}, {"seed": 1, "rounds": 3}])
    ['fedavg', 'fedavg']
    >>> distinguish("fedavg", [{"topology": "star"}, {"topology": "ring"}])
    ['fedavg (topology=star)', 'fedavg (topology=ring)']
    """
    texts = [flat(run) for run in runs]
    names = dict.fromkeys(name for text in texts for name in text)
    differing = [name for name in names if len({text.get(name, "") for text in texts}) > 1]
    if not differing:
        return [method] * len(runs)
    return [f"{method} ({', '.join(_pair(name, text.get(name, '')) for name in differing)})" for text in texts]


def _pair(name: str, value: str) -> str:
    shown = value if len(value) <= LONGEST else f"...{value[-LONGEST:]}"
    return f"{name}={shown or 'default'}"
