"""`kilter serve --inspect`: what the sites share about their tables, without training; the same run folder can train afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from place import LENIENT, Place

from kilter.net.audit import verify


def write_table(path: Path, scale: float, labels: str) -> None:
    lines = [f"{scale * (150 + i % 40):.1f},{'fm'[i % 2]},{labels[i % len(labels)]}" for i in range(80)]
    path.write_text("height,sex,label\n" + "\n".join(lines) + "\n")


def test_a_server_shows_what_sites_share_and_does_not_train(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", rounds=1)
    write_table(here.folder / "a.csv", 1.0, "xy")
    write_table(here.folder / "b.csv", 0.01, "xy")  # in another unit
    write_table(here.folder / "c.csv", 1.0, "x")
    (here.folder / "closed.toml").write_text(LENIENT.replace('"statistics"', '"counts"'))
    server = here.serve("--data", "none", "--inspect", "--quorum", "2", "--grace", "1")
    closed = here.join("c", "--data", "c.csv", "--policy", "closed.toml")
    server.until("c is here")
    sites = [here.join(name, "--data", f"{name}.csv") for name in ("a", "b")]
    text = server.wait()
    assert "policy does not allow" in closed.wait(code=2)
    assert "To train, start the server again without --inspect" in text
    assert not (here.folder / "run/rounds.jsonl").exists()
    report = json.loads((here.folder / "run/inspection.json").read_text())
    shown = {site["name"]: site["rows"] for site in report["sites"]}
    assert set(shown) == {"a", "b"}  # the policy of c keeps its statistics
    assert "height" in text
    assert "unit" in (here.folder / "run/inspection.html").read_text()
    for site in sites:
        site.wait()
    for name, leaves in (("a", True), ("c", False)):
        entries = list(verify(here.folder / f"state-{name}/audit.jsonl"))
        assert any(entry.kinds == "statistics" and entry.bytes > 0 for entry in entries) == leaves, entries
    again = here.serve("--data", "none", "--quorum", "2", "--grace", "1", port=here.port)
    for name in ("a", "b"):
        here.join(name, "--data", f"{name}.csv")
    again.wait()
    assert here.rounds()[-1]["participants"] == ["a", "b"]
