"""docs/deploy.md, docs/hospital.md and docs/how-to/semi-decentralised.md, run from top to bottom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from place import Place, free_ports

DOCS = Path(__file__).parents[2] / "docs"


def run_page(name: str, folder: Path, ports: tuple[str, ...]) -> str:
    """Run every shell block of a page, on free ports; what it printed."""
    blocks = [
        b for b in re.findall(r"```bash\n(.*?)```", (DOCS / name).read_text(), re.DOTALL) if "pip install" not in b
    ]
    script = "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + "".join(blocks)
    for port, free in zip(ports, free_ports(len(ports)), strict=True):
        script = script.replace(f":{port}", f":{free}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_deploy_works(tmp_path: Path) -> None:
    printed = run_page("deploy.md", tmp_path, ("9443", "9444", "9501", "9502", "9503"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["failures"] == 0
    assert "train: " in printed  # of the dry run
    assert "here: " in printed  # of the status
    for site in "abc":
        assert (tmp_path / f"peer-{site}/summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_semi_decentralised_works(tmp_path: Path) -> None:
    printed = run_page("how-to/semi-decentralised.md", tmp_path, ("9743", "9751", "9752", "9753"))
    for folder in ("run", "peer-a", "peer-b", "peer-c"):
        summary = json.loads((tmp_path / folder / "summary.json").read_text())
        assert (summary["rounds"], summary["failures"], summary["topology"]) == (4, 0, "rotating")
    assert "hand-over to hospital-b: sealed: state and memory of the aggregator" in printed
    assert list(tmp_path.glob("state-a/models/*/model.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_hospital_works(tmp_path: Path) -> None:
    printed = run_page("hospital.md", tmp_path, ("9643",))
    assert "What could be inferred" in printed
    assert "all genuine" in printed
    assert "reply to server: counts model" in printed
    assert json.loads((tmp_path / "run/summary.json").read_text())["failures"] == 0
    assert (tmp_path / "audit.csv").exists()


def test_a_dry_run_shows_what_would_leave_and_status_and_metrics_tell(place: Callable[..., Place]) -> None:
    here = place(method="scaffold")
    (metrics,) = free_ports(1)
    here.serve("--metrics", f"127.0.0.1:{metrics}")
    dry = here.join("a", "--dry-run").wait()
    assert re.search(r"train: \d+ bytes", dry)
    assert re.search(r"reply\.0\.body\.1\.weight\s+torch\.float32 \(8, 64\)", dry)
    assert ":evaluate" in dry
    here.join("b").until("here as b")
    options = ["--server", f"127.0.0.1:{here.port}", "--tls", "certs/a"]
    told = here.kilter("status", *options, name="status").wait()
    assert "here: b" in told
    assert "away: a, c" in told
    text = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=20).read().decode()
    assert 'kilter_site_up{site="b"} 1.0' in text
    assert 'kilter_site_up{site="c"} 0.0' in text
    refused = here.join("c", "--allow-methods", "fedavg").wait(code=2)
    assert "only allows fedavg" in refused
