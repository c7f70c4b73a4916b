"""One self-contained HTML page about studies and runs: it opens offline and asks nobody for anything."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import msgspec
from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape

from kilter import __version__
from kilter.records.run_folder import write
from kilter.report.page_data import PageData, collect
from kilter.report.summary_text import sentences

WEB = files("kilter.report") / "web"
LIBRARIES = ("d3.min.js", "plot.umd.min.js")
SCRIPTS = ("charts.js", "tables.js", "insights.js", "views.js")


def write_report(paths: Sequence[Path], out: Path, title: str = "") -> None:
    """Write a page about these study and run folders."""
    data = collect(paths)
    title = title or ", ".join(dict.fromkeys(c.name for c in data.comparisons))
    write(out, page(data, title))


def page(data: PageData, title: str) -> str:
    """The page's text."""
    return render("report.html", title, data_of(data), (*SCRIPTS, "report.js"))


def data_of(data: PageData) -> dict[str, object]:
    """The page's data with its summary in words."""
    return {"data": data, "summaries": [sentences(c) for c in data.comparisons]}


def render(template: str, title: str, data: dict[str, object], scripts: Sequence[str]) -> str:
    """A template with its styles, libraries, scripts and data in it."""
    environment = Environment(
        loader=FunctionLoader(_text), autoescape=select_autoescape(), undefined=StrictUndefined, cache_size=0
    )
    return environment.get_template(template).render(
        title=title,
        version=__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=_text("style.css"),
        libraries=[_text(name) for name in LIBRARIES],
        script="\n".join(map(_text, scripts)),
        data=_as_script(data),
    )


def _text(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _as_script(data: object) -> str:
    """JSON that cannot end the script element it is in. NaN becomes null."""
    text = msgspec.json.encode(data, enc_hook=str).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
