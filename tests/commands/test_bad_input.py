"""Bad data on the command line: one sentence, exit code 2, no traceback, no folder; and what only looks bad is read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from kilter import cli

GOOD = "age;bmi;outcome;site\n" + "".join(
    f"{20 + i};{i},5;{'ill' if i % 2 else 'well'};{'AB'[i % 2]}\n" for i in range(40)
)
NAMED = ["--label", "outcome", "--client", "site"]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kilter", "run", *words, "--rounds", "1", "--workers", "1", "--out", "r"])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))


def text(content: str) -> Callable[[Path], None]:
    return lambda path: Path(path).write_text(content, encoding="utf-8") and None  # type: ignore[func-returns-value]


def pictures(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8)).save(path / name)

    return write


BAD: dict[str, tuple[str, Callable[[Path], None], list[str], str]] = {
    "wrong column": ("t.csv", text(GOOD), ["--label", "outcom"], "did you mean 'outcome'"),
    "wrong client": ("t.csv", text(GOOD), ["--label", "outcome", "--client", "sit"], "did you mean 'site'"),
    "too many cells": ("t.csv", text(GOOD + "1;2;ill;A;5\n"), NAMED, "line 42, has 5 cells"),
    "empty label": ("t.csv", text(GOOD + "1;2;;A\n"), NAMED, "no label in .*line 42"),
    "NaN label": ("t.csv", text(GOOD + "1;2;NaN;A\n"), NAMED, "no label in .*line 42"),
    "empty client": ("t.csv", text(GOOD + "1;2;ill;\n"), NAMED, "no client in .*line 42"),
    "not UTF-8": (
        "t.csv",
        lambda path: path.write_bytes(GOOD.encode() + b"\xff\xfe;1;ill;A\n") and None,
        NAMED,
        "UTF-8",
    ),
    "empty file": ("t.csv", text(""), NAMED, "is empty: its first line must name the columns"),
    "zero bytes": ("t.csv", text(GOOD.replace("20;", "2\0;")), NAMED, "is not text: it has zero bytes"),
    "a cell of a megabyte": (
        "t.csv",
        text(GOOD + f"1;{'x' * 5_000_000};ill;A\n"),
        NAMED,
        "a line of more than a million",
    ),
    "a number of 300,000 digits": (
        "t.csv",
        text(GOOD + f"1;{'9' * 300_000};ill;A\n"),
        NAMED,
        "infinite number in .*line 42",
    ),
    "dropped column that is not there": (
        "t.csv",
        text(GOOD),
        [*NAMED, "--drop", "agee"],
        "for --drop .* did you mean 'age'",
    ),
    "label that is the client": (
        "t.csv",
        text(GOOD),
        ["--label", "site", "--client", "site"],
        "both name the column 'site'",
    ),
    "one class": (
        "t.csv",
        text(GOOD.replace("ill", "well")),
        NAMED,
        "has the label 'well', so there is nothing to learn",
    ),
    "images that are none": ("t.csv", text(GOOD), [*NAMED, "--image-size", "8"], "not images: leave out image_size"),
    "numbers as classes": ("t.csv", text(GOOD), ["--label", "bmi"], "use --task regression, or name"),
    "options of a table": (
        "f",
        pictures("a/1.png", "b/1.png"),
        ["--label", "y"],
        "holds images, not a table: leave out label",
    ),
    "no such file": ("t.csv", lambda _: None, [], r"There is no file"),
    "empty folder": ("folder", lambda path: path.mkdir(), [], "no images in folders"),
    "other test classes": ("f", pictures("train/a/1.png", "train/b/1.png", "test/c/1.png"), [], "the class 'c'"),
    "images without classes": ("f", pictures("a/b/c/1.png"), [], "is in 3 folders"),
    "bad size": ("f", pictures("a/1.png", "b/1.png"), ["--image-size", "big"], "--image-size takes"),
    "bad preparation": ("t.csv", text(GOOD), [*NAMED, "--prepare", "fill=best"], "--prepare"),
    "text that is not there": ("t.csv", text(GOOD), [*NAMED, "--text", "note"], "column for --text"),
    "no tokenizer": ("t.csv", text(GOOD), [*NAMED, "--tokenizer", "gone.json"], "tokenizer 'gone.json' cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_in_one_sentence(case: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    name, write, words, message = BAD[case]
    write(Path(name))
    assert run(monkeypatch, "--data", f"./{name}", *words) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error
    assert error.count("\n") == 1
    assert not Path("r").exists()


def test_semicolons_decimal_commas_words_and_unicode_paths_are_fine(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    Path("Köln").mkdir()
    Path("Köln/Straße.csv").write_text(GOOD)
    assert run(monkeypatch, "--data", "Köln/Straße.csv", *NAMED) == 0
    text = capsys.readouterr().out
    assert "Clients: the 2 that the data names" in text
    assert "Numbers: age, bmi (standardised" in text


def test_a_client_without_test_rows_gets_some_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.csv").write_text(GOOD)
    Path("test.csv").write_text(GOOD.replace(";B", ";A"))
    assert run(monkeypatch, "--data", "t.csv", "--test-file", "test.csv", *NAMED) == 0


def test_a_damaged_image_is_named_in_the_first_lines(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pictures(*(f"{site}/{label}/{k}.png" for site in "uv" for label in "ab" for k in range(6)))(Path("f"))
    Path("f/u/a/bad.jpg").write_bytes(b"\xff\xd8\xff")
    assert run(monkeypatch, "--data", "f") == 0
    assert re.search(
        r"Skipped 1 of 25 images that cannot be read: '.*bad.jpg'", capsys.readouterr().out.replace("\n", "")
    )
