"""A result as HTML, for notebooks: the last and best round in a table, and the main metric by round as a small curve."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kilter.records.display import metric, size
from kilter.records.notices import describe
from kilter.records.types import Evaluation, Round, Summary

WIDTH, HEIGHT = 360, 110


def result_html(summary: Summary, rounds: Sequence[Round]) -> str:
    """The result of a run."""
    main = summary.chosen_by
    rows = [_row("last round", summary.last, main)]
    if summary.best:
        rows.append(_row("best on validation rows", summary.best, main))
    head = "".join(f"<th>{escape(h)}</th>" for h in ("", "round", f"global {main}", f"clients' {main}", "worst tenth"))
    title = f"{summary.method}, {summary.rounds} rounds, {summary.clients} clients, seed {summary.seed}"
    traffic = f"Traffic {size(summary.bytes_up)} up, {size(summary.bytes_down)} down; {summary.seconds:.1f} s"
    notices = "".join(f"<li>{escape(describe(notice))}</li>" for notice in summary.notices)
    return (
        f"<div><b>{escape(title)}</b><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"{curve_svg(rounds, main)}<p>{escape(traffic)}</p>"
        + (f"<p>Not as intended:</p><ul>{notices}</ul>" if notices else "")
        + "</div>"
    )


def _row(name: str, evaluation: Evaluation, main: str) -> str:
    scores, over = evaluation.scores, evaluation.client.get(main)
    cells = [
        name,
        str(evaluation.round),
        metric(main, scores.metrics.get(main) if scores else None),
        f"{metric(main, over.mean)} ± {metric(main, over.std)}" if over else "-",
        metric(main, over.worst_decile) if over else "-",
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def curve_svg(rounds: Sequence[Round], main: str) -> str:
    """The global metric and the clients' mean by round; empty with fewer than two evaluated rounds."""
    lines = {
        "global": [(r.round, v) for r in rounds if (v := (r.global_metrics or {}).get(main)) is not None],
        "clients": [(r.round, r.client[main].mean) for r in rounds if main in r.client],
    }
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return ""
    values = [v for points in lines.values() for _, v in points]
    low, high = min(values), max(values)
    first, last = (pick(t for points in lines.values() for t, _ in points) for pick in (min, max))
    parts = []
    for (name, points), (colour, dash) in zip(lines.items(), (("#0072B2", ""), ("#D55E00", "5 3")), strict=False):
        at = " ".join(
            f"{(t - first) / (last - first) * WIDTH:.1f},{(1 - (v - low) / ((high - low) or 1)) * HEIGHT:.1f}"
            for t, v in points
        )
        parts.append(
            f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}">'
            f"<title>{name}</title></polyline>"
        )
    label = f"{main} by round, from {metric(main, low)} to {metric(main, high)}; solid: global, dashed: mean of clients"
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{WIDTH}" height="{HEIGHT}" viewBox="-4 -4 {WIDTH + 8} {HEIGHT + 8}">'
        f"{''.join(parts)}</svg><p>{escape(label)}</p>"
    )
