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
        if best := _best(lines, measure, comparison):
            text.append(f"{cell}: {best}")
        if own := _best(lines, "client", comparison):
            text.append(
                own.replace(f"client {comparison.metric}", f"mean {comparison.metric} over the clients' own test rows")
            )
        text += _differences(lines, measure, comparison)
    if len(cells) > 4:
        text.append(f"The table has the other {len(cells) - 4} settings.")
    text += _problems(comparison)
    return text


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _best(lines: Sequence[Line], measure: str, comparison: Comparison) -> str:
    """Who is best. Whether low or high is better is known for accuracies only; other metrics are left to the table."""
    if not comparison.in_percent:
        return ""
    known = [(line[f"{measure}_mean"], line) for line in lines if isinstance(line.get(f"{measure}_mean"), float)]
    if not known:
        return ""
    value, line = max(known, key=lambda pair: float(str(pair[0])))
    sent = line.get("bytes")
    traffic = f", with {size(sent)} of traffic" if isinstance(sent, float) and sent else ""
    return f"{line['method']} has the highest {measure} {comparison.metric}, {100 * float(str(value)):.1f} %{traffic}."


def _differences(lines: Sequence[Line], measure: str, comparison: Comparison) -> list[str]:
    reference, what = comparison.reference, f"{measure} {comparison.metric}"
    groups: dict[str, list[str]] = {}
    for line in lines:
        verdict = line.get(f"{measure}_difference_verdict")
        if isinstance(verdict, str):
            difference = float(str(line[f"{measure}_difference"]))
            shown = f"{100 * difference:+.1f} points" if comparison.in_percent else f"{difference:+.3g}"
            groups.setdefault(verdict, []).append(f"{line['method']} ({shown})")
    words = {
        "higher": f"Higher {what} than {reference}: ",
        "lower": f"Lower {what} than {reference}: ",
        "no difference shown": f"No difference in {what} from {reference} shown: ",
        "identical": f"Identical {what} to {reference}: ",
        "too few seeds to tell": f"Too few seeds to compare {what}: ",
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
