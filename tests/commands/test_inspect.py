"""kilter inspect: in the terminal, as JSON and as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kilter import cli
from kilter.data import Schema


def kilter(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kilter", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 17},{'ab'[i % 2]},{i % 2},{'NESW'[i % 4]}" for i in range(80)]
    Path("t.csv").write_text("age,co<de,outcome,site\n" + "\n".join(lines))
    return Path("t.csv")


def test_the_terminal_shows_columns_clients_and_warnings(table, monkeypatch, capsys):
    assert (
        kilter(monkeypatch, "inspect", "t.csv", "--label", "outcome", "--client", "site", "--schema-file", "s.toml")
        == 0
    )
    text = capsys.readouterr().out
    assert "64 for training, 16 for test" in text
    assert "`co<de` alone predicts the label (AUROC 1.00)" in text
    assert "N has one class." in text
    assert Schema.read("s.toml").names == ("age", "co<de")


def test_json_and_page_hold_the_same(table, monkeypatch, capsys):
    words = ["inspect", "t.csv", "--label", "outcome", "--client", "site", "--json", "--html", "out/page.html"]
    Path("out").mkdir()
    assert kilter(monkeypatch, *words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["train"] == 64
    assert len(report["clients"]) == 4
    page = Path("out/page.html").read_text()
    assert page.count("<svg") == 6
    assert "`co&lt;de` alone predicts the label" in page
    assert "<script" not in page


def test_a_mistake_is_one_sentence(table, monkeypatch, capsys):
    assert kilter(monkeypatch, "inspect", "t.csv") == 2
    assert capsys.readouterr().err.count("\n") == 1
