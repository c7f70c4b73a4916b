"""The results of a comparison in a few plain sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kilter.records.display import size
from kilter.report.page_data import Comparison

Line = Mapping[str, object]


def sentences(comparison: Comparison, measure: str = "global") -> list[str]:
    """What was compared, who is best, what differs from the reference, and what did not happen."""
    cells = list(dict.fromkeys(str(line["cell"]) for line in comparison.lines))
    methods = list(dict.fromkeys(str(line["method"]) for line in comparison.lines))
    of = f"{_count(len(cells), 'setting')} and {_count(len(comparison.seeds), 'seed')}"
    text = [f"{_count(len(methods), 'method')} in {of}; the reference is {comparison.reference}."]
    for cell in cells[:4]:
        lines = [line for line in comparison.lines if line["cell"] == cell]
        if best := _best(lines, measure):
            text.append(f"{cell}: {best}")
        if own := _best(lines, "client"):
            text.append(own.replace("client accuracy", "mean accuracy over the clients' own test rows"))
        text += _differences(lines, measure, comparison.reference)
    if len(cells) > 4:
        text.append(f"The table has the other {len(cells) - 4} settings.")
    text += _problems(comparison)
    return text


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _best(lines: Sequence[Line], measure: str) -> str:
    known = [(line[f"{measure}_mean"], line) for line in lines if isinstance(line.get(f"{measure}_mean"), float)]
    if not known:
        return ""
    value, line = max(known, key=lambda pair: float(str(pair[0])))
    sent = line.get("bytes")
    traffic = f", with {size(sent)} of traffic" if isinstance(sent, float) and sent else ""
    return f"{line['method']} has the highest {measure} accuracy, {100 * float(str(value)):.1f} %{traffic}."


def _differences(lines: Sequence[Line], measure: str, reference: str) -> list[str]:
    groups: dict[str, list[str]] = {}
    for line in lines:
        verdict = line.get(f"{measure}_difference_verdict")
        if isinstance(verdict, str):
            points = 100 * float(str(line[f"{measure}_difference"]))
            groups.setdefault(verdict, []).append(f"{line['method']} ({points:+.1f} points)")
    words = {
        "higher": f"Higher {measure} accuracy than {reference}: ",
        "lower": f"Lower {measure} accuracy than {reference}: ",
        "no difference shown": f"No difference in {measure} accuracy from {reference} shown: ",
        "identical": f"Identical {measure} accuracy to {reference}: ",
        "too few seeds to tell": f"Too few seeds to compare {measure} accuracy: ",
    }
    return [start + _listed(groups[verdict]) + "." for verdict, start in words.items() if verdict in groups]


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _problems(comparison: Comparison) -> list[str]:
    text = []
    if comparison.failures:
        text.append(f"{_count(len(comparison.failures), 'run')} failed: see below.")
    runs = [run for line in comparison.lines for run in _runs(line)]
    calls = sum(int(str(run.get("failures") or 0)) for run in runs)
    if calls:
        text.append(f"{_count(calls, 'call')} to clients failed in all runs together.")
    noticed = sum(bool(run.get("notices")) for run in runs)
    if noticed:
        text.append(f"In {_count(noticed, 'run')} something did not happen as intended: see the list below.")
    return text


def _runs(line: Line) -> list[Mapping[str, object]]:
    runs = line["runs"]
    assert isinstance(runs, list)
    return runs
