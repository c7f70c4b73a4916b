"""Studies that are run: interrupted, added to, with runs that fail."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kilter.cli import app
from kilter.errors import Mistake
from kilter.report.study_page import publish
from kilter.study.folder import Folder
from kilter.study.grid import Study
from kilter.study.pipeline import conduct
from kilter.study.results import Results

EXPERIMENT: dict[str, Any] = {
    "data": "digits",
    "model": "linear",
    "clients": 4,
    "rounds": 2,
    "partition": "dirichlet:0.5",
}


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are beside the point: they take a second."""
    monkeypatch.setattr("kilter.report.study_page.draw", lambda *_: [])


def small(**changes: Any) -> Study:
    return Study.of({"name": "small", "methods": ["fedavg", "solo"], "seeds": 2, "experiment": EXPERIMENT, **changes})


def run(study: Study, path: Path, at_once: int = 2) -> tuple[Results, str]:
    out = io.StringIO()
    with Folder(path) as folder:
        results = conduct(study, folder, at_once, Console(file=out, width=300))
        publish(results, path, "kilter compare")
    return results, out.getvalue()


def table(path: Path) -> list[dict[str, str]]:
    """table.csv but for the seconds."""
    rows = list(csv.DictReader(io.StringIO((path / "table.csv").read_text())))
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_study_and_what_it_leaves(tmp_path: Path) -> None:
    results, out = run(small(methods=["fedavg", {"method": "fedprox", "mu": 0.0, "label": "mu 0"}]), tmp_path / "s")
    assert not results.failures
    assert out.count("\n[") == 4
    assert "left" in out
    there = {p.name for p in (tmp_path / "s").iterdir()}
    assert there == {".lock", "study.toml", "runs", "table.md", "table.csv", "results.json", "results.md", "figures"}
    for folder in (tmp_path / "s" / "runs").iterdir():
        assert {"experiment.toml", "rounds.jsonl", "summary.json", "clients.json"} <= {p.name for p in folder.iterdir()}
        assert not (folder / "output.txt").exists()
    page = (tmp_path / "s" / "results.md").read_text()
    for word in ("kilter compare", "commit", "date", "torch", "figures/bytes.png"):
        assert word in page
    assert "identical" in page  # FedProx with mu 0 is FedAvg, on the same splits, weights and batches
    kept = json.loads((tmp_path / "s" / "results.json").read_text())
    assert len(kept["lines"]) == 2
    assert len(kept["lines"][0]["runs"][0]["curves"]["global"]) == 2


@pytest.mark.usefixtures("no_figures")
def test_added_seeds_and_methods_run_only_what_is_new(tmp_path: Path) -> None:
    run(small(seeds=1), tmp_path / "s")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("s/runs/*/summary.json")}
    assert len(before) == 2
    _, out = run(small(seeds=1), tmp_path / "s")
    assert out == ""  # nothing to do
    _, out = run(small(seeds=2), tmp_path / "s")
    assert "4 runs, 2 already done" in out
    more = small(seeds=2, methods=["fedavg", "solo", "fedprox"])
    _, out = run(more, tmp_path / "s")
    assert "6 runs, 4 already done" in out
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    run(more, tmp_path / "at once")
    assert table(tmp_path / "s") == table(tmp_path / "at once")


@pytest.mark.usefixtures("no_figures")
def test_clients_take_the_same_turns_under_every_method(tmp_path: Path) -> None:
    run(small(methods=["fedavg", "fedprox", "scaffold"], seeds=1, experiment={**EXPERIMENT, "cohort": 0.5}), tmp_path)
    turns = [
        [json.loads(line)["participants"] for line in p.read_text().splitlines()[1:]]
        for p in tmp_path.glob("runs/*/rounds.jsonl")
    ]
    assert len(turns) == 3
    assert len(turns[0][0]) == 2
    assert turns[0] == turns[1] == turns[2]


BAD = '''
import os, signal, sys
from dataclasses import dataclass
from kilter import Method, Mistake

@dataclass(frozen=True, kw_only=True)
class Bad(Method):
    """Fails in its own way."""

    how: str = "mistake"  # which

    def setup(self, fed):
        return self.task.init(fed.seed)

    def round(self, fed, state):
        if fed.round < 2:  # the first round is tried before the run
            return state
        print("about to fail")
        if self.how == "mistake":
            raise Mistake("This cannot work: do something else.")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a bug of mine")
'''


@pytest.mark.usefixtures("no_figures")
def test_failed_runs_are_reported_and_do_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    spec = f"{tmp_path / 'bad.py'}:Bad"
    bad = [{"method": spec, "how": how, "label": how} for how in ("mistake", "killed", "bug")]
    study = small(methods=[*bad, "fedavg", "solo"], reference="fedavg", seeds=1)
    results, out = run(study, tmp_path / "s")
    reasons = {f.job.label: f.reason for f in results.failures}
    assert set(reasons) == {"mistake", "killed", "bug"}
    assert reasons["mistake"] == "This cannot work: do something else."
    assert "signal 9" in reasons["killed"]
    assert "RuntimeError: a bug of mine" in reasons["bug"]
    assert "error.txt" in reasons["bug"]
    assert "FAILED" in out
    assert "about to fail" not in out
    assert "a bug of mine" in next((tmp_path / "s" / "runs").glob("*/error.txt")).read_text()
    done = {row["method"]: row["seeds"] for row in table(tmp_path / "s")}
    assert done == {"mistake": "0", "killed": "0", "bug": "0", "fedavg": "1", "solo": "1"}
    page = (tmp_path / "s" / "table.md").read_text()
    assert "This cannot work" in page


@pytest.mark.usefixtures("no_figures")
def test_data_that_cannot_be_loaded_is_a_failed_run(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"not an archive")
    study = small(seeds=1, methods=["fedavg"], grid={"data": [str(tmp_path / "bad.npz"), "digits"]})
    results, _ = run(study, tmp_path / "s")
    (failure,) = results.failures
    assert "bad.npz" in failure.reason
    assert sum(len(line.runs) for cell in results.cells for line in cell.lines) == 1


@pytest.mark.usefixtures("no_figures")
def test_tuning_runs_end_in_the_table(tmp_path: Path) -> None:
    results, out = run(small(methods=["fedavg", "fedprox"], seeds=1, tune={"mu": [0.0, 100.0]}), tmp_path)
    (choice,) = results.choices
    assert choice.settings == {"mu": 0.0}
    assert choice.runs == 2
    assert "small: tuning: 2 runs" in out
    assert "mu = 0.0" in (tmp_path / "table.md").read_text()
    assert table(tmp_path)[1]["tuned"] == "mu = 0.0"
    _, out = run(small(methods=["fedavg", "fedprox"], seeds=1, tune={"mu": [0.0, 100.0]}), tmp_path)
    assert out == ""


def test_folders_that_are_not_a_studys(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.toml").touch()
    for name in ("mine", "run", "mine/thesis.tex"):
        with pytest.raises(Mistake, match="choose another"):
            Folder(tmp_path / name)


def test_two_studies_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilter.study.folder.PATIENCE", 0.2)
    with Folder(tmp_path / "s"), pytest.raises(Mistake, match="Another study"), Folder(tmp_path / "s"):
        pass


# The command line -----------------------------------------------------------------------------------------------------


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    code = "from kilter.cli import main; main()"
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


STUDY = """
name = "cut"
methods = ["fedavg", "scaffold"]
seeds = 2
target = 0.5
[experiment]
model = "linear"
clients = 4
rounds = 15
lr = 0.05
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_study_killed_and_resumed_gives_the_same_table(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    run(Study.read(tmp_path / "study.toml"), tmp_path / "whole")
    cut = tmp_path / "cut"

    def moment(when: int) -> bool:
        """Inside the first runs; after a run; and in whatever runs come later."""
        lines = sum(len(p.read_bytes().splitlines()) for p in cut.glob("runs/*/rounds.jsonl"))
        return (lines > 5, any(cut.glob("runs/*/summary.json")), lines > 40)[when]

    for when, kind in enumerate((signal.SIGKILL, signal.SIGINT, signal.SIGKILL)):
        process = start("compare", "study.toml", "--out", "cut", "--jobs", "2", cwd=tmp_path)
        while process.poll() is None and not moment(when):
            time.sleep(0.01)
        process.send_signal(kind)
        out, _ = process.communicate(timeout=60)
        assert process.returncode in ((-signal.SIGKILL, 0) if kind == signal.SIGKILL else (130, 0)), out
        if process.returncode == 130:
            assert "repeat the command to resume" in out
    finished = {p: p.stat().st_mtime_ns for p in cut.glob("runs/*/summary.json")}
    assert finished
    process = start("compare", "study.toml", "--out", "cut", cwd=tmp_path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert table(cut) == table(tmp_path / "whole")
    assert all(p.stat().st_mtime_ns == t for p, t in finished.items())
    assert (cut / "table.md").read_text().count("fedavg") == (tmp_path / "whole" / "table.md").read_text().count(
        "fedavg"
    )


@pytest.mark.processes
def test_children_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        STUDY.replace("rounds = 15", "rounds = 100000").replace("seeds = 2", "seeds = 1")
    )
    process = start("compare", "study.toml", "--out", "s", cwd=tmp_path)
    while process.poll() is None and not any((tmp_path / "s").glob("runs/*/rounds.jsonl")):
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.kill()
    process.communicate()
    until = time.monotonic() + 10
    while any(_alive(int(c)) for c in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_alive(int(c)) for c in children)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_compare_from_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "compare --methods fedavg,fedprox:mu=0.1 --seeds 1 --partition iid,dirichlet:0.1 --rounds 1 --clients 3 --model linear"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert "digits, iid" in done.output
    assert "fedprox mu=0.1" in done.output
    assert "Files: studies/digits-iid-dirichlet-0.1" in done.output.replace("\n", "")
    assert (tmp_path / "studies/digits-iid-dirichlet-0.1/figures/clients.svg").exists()


@pytest.mark.usefixtures("no_figures")
def test_a_failed_run_ends_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    spec = f"{tmp_path / 'bad.py'}:Bad"
    words = [
        "compare",
        "--methods",
        f"fedavg,{spec}",
        "--seeds",
        "1",
        "--rounds",
        "2",
        "--model",
        "linear",
        "--out",
        str(tmp_path / "s"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "This cannot work" in done.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("compare", "Nothing to compare"),
        ("compare none.toml", "cannot be read"),
        ("compare --methods fedavg --seeds many", "--seeds"),
        ("compare --methods fedavg --jobs 0", "--jobs"),
        ("compare --methods fedavg --tune mu", "--tune takes"),
        ("compare --methods fedavg --target 90", "target"),
        ("reproduce label-skew", "no experiments/ folder"),
    ],
)
def test_mistakes_on_the_command_line(words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words.split())
    assert isinstance(done.exception, Mistake)
    assert text in str(done.exception)


TINY = """
methods = ["fedavg", "solo"]
seeds = 1
[experiment]
model = "linear"
clients = 3
[presets.laptop.experiment]
rounds = 1
[presets.paper]
[paper]
source = "Someone"
[[paper.numbers]]
method = "solo"
data = "digits"
global = 0.284
"""


@pytest.mark.usefixtures("no_figures")
def test_reproduce_writes_beside_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "experiments" / "tiny"
    home.mkdir(parents=True)
    (home / "study.toml").write_text(TINY)
    done = CliRunner().invoke(app, ["reproduce", "tiny", "--preset", "laptop"])
    assert done.exit_code == 0, done.output
    page = (home / "results" / "laptop" / "results.md").read_text()
    assert page.startswith("# tiny, preset laptop")
    assert "28.4" in page
    with pytest.raises(Mistake, match="did you mean 'tiny'"):
        CliRunner().invoke(app, ["reproduce", "tiy"], catch_exceptions=False)
    with pytest.raises(Mistake, match="did you mean 'paper'"):
        CliRunner().invoke(app, ["reproduce", "tiny", "--preset", "papr"], catch_exceptions=False)


def test_an_installed_study_is_copied_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kilter.commands.study import find_experiment

    home = tmp_path / "prefix/share/kilter/experiments/tiny"
    home.mkdir(parents=True)
    (home / "study.toml").write_text('methods = ["fedavg"]')
    (home / "data.npz").write_bytes(b"rows")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.chdir(tmp_path)
    assert find_experiment("tiny") == Path("experiments/tiny/study.toml")
    assert Path("experiments/tiny/study.toml").read_text() == 'methods = ["fedavg"]'
    assert Path("experiments/tiny/data.npz").read_bytes() == b"rows"


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    began = time.monotonic()
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")])
    assert done.exit_code == 0, done.output
    for name in ("fedavg", "feddisk", "slfed", "fedpdc", "fedsbme", "fedep", "solo", "pooled"):
        assert name in done.output
    assert "Files:" in done.output
    assert all(len(line) <= 80 for line in done.output.splitlines() if "±" in line)
    assert os.cpu_count() == 1 or time.monotonic() - began < 300
