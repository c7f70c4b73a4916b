"""Real sites and servers as processes: approval, dry runs, restarts after the end, and messages that say what to do."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from place import BUILT_IN, Place, free_ports

from kilter.net import tls


def digest_of(text: str) -> str:
    return re.findall(r"Digest of these terms: ([0-9a-f]{32})", text)[-1]


def test_a_site_looks_at_the_terms_approves_them_joins_and_checks_what_left(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", rounds=1, sites=("a",))
    server = here.serve()
    refused = here.join("a", BUILT_IN).wait(code=2)
    assert "not approved" in refused
    shown = here.join("a", BUILT_IN, "--dry-run").wait()
    assert "model weights trained on the node's rows" in shown
    assert "not approved at this site" in shown
    digest = digest_of(shown)
    assert digest in refused
    approved = here.kilter("approve", digest, "--state-dir", "state-a", name="approve").wait()
    assert digest in approved
    here.join("a", BUILT_IN).wait()
    server.wait()
    audit = here.kilter("audit", "--state-dir", "state-a", "--export", "audit.csv", name="audit").wait()
    assert "all genuine" in audit
    assert re.search(r"reply to server: counts model", audit)
    assert (here.folder / "audit.csv").read_text().count("reply") >= 2
    for path in (here.folder / "state-a").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path  # finding 11


def test_a_server_killed_after_its_summary_tells_waiting_sites_and_ends(place: Callable[..., Place]) -> None:
    """Finding 9: it refused to start again, while sites waited for 24 hours."""
    here = place(method="fedavg", rounds=1, sites=("a", "b"))
    server = here.serve()
    sites = here.all()
    server.until("round 1/1")
    server.wait()
    for site in sites:
        assert "the run is finished" in site.wait()
        assert "lost" not in site.said()  # finding 13: a normal end was logged as a lost stream
    assert "lost" not in server.said()
    waiting = here.join("a")  # it missed the goodbye
    again = here.serve("--grace", "20", port=here.port)
    assert "the run is finished" in waiting.wait()
    here.join("b").wait()
    assert "is finished" in again.wait()


def test_sites_learn_why_a_server_stopped(place: Callable[..., Place]) -> None:
    """Finding 13: sites were not told why a server stopped."""
    here = place(method="fedavg", rounds=50, local={"lr": 0.1, "batch": 1, "epochs": 3})
    server = here.serve()
    sites = here.all()
    server.until("round 1/50")
    server.popen.terminate()
    sites[0].until("the server stopped: it was interrupted")
    server.popen.join(30)
    assert server.popen.exitcode in (130, 143, -signal.SIGTERM)


def test_one_site_with_other_data_does_not_end_a_server_without_data(place: Callable[..., Place]) -> None:
    """Finding 13: one wrong hello with `--data none` ended the server; a dry run hung against it."""
    here = place(method="fedavg", rounds=1)
    with np.load(here.folder / "c.npz") as data:
        parts = {**data, "x_train": data["x_train"][:, :4], "x_test": data["x_test"][:, :4]}
    np.savez(here.folder / "c.npz", **parts)
    server = here.serve("--data", "none", "--quorum", "2", "--grace", "1")
    assert "does not know the shape of the data" in here.join("a", "--dry-run").wait(code=2)
    here.join("a")
    server.until("a is here")
    wrong = here.join("c")
    assert "differ" in wrong.wait(code=2)
    here.join("b")
    server.wait()
    assert here.rounds()[-1]["participants"] == ["a", "b"]


def test_a_wrong_authority_and_a_server_without_tls_end_a_site(place: Callable[..., Place]) -> None:
    """Finding 13: a wrong CA or plaintext only retried."""
    here = place(method="fedavg", rounds=1)
    tls.new(here.folder / "foreign", ["a"])
    here.serve()
    foreign = here.kilter(
        "join",
        "--server",
        f"127.0.0.1:{here.port}",
        "--tls",
        "foreign/a",
        "--data",
        "a.npz",
        "--state-dir",
        "state-f",
        name="f",
    )
    assert "No secure connection" in foreign.wait(code=2)
    (port,) = free_ports(1)
    plain = here.kilter(
        "serve",
        "experiment.toml",
        "--insecure",
        "--sites",
        "a",
        "--out",
        "plain",
        "--listen",
        f"127.0.0.1:{port}",
        name="plain",
    )
    plain.until("Listening")
    assert "No secure connection" in here.join("a", port=port).wait(code=2)


def test_two_sites_cannot_share_a_new_state_directory(place: Callable[..., Place]) -> None:
    """Finding 13: two joins sharing a new state directory raced for seal.key."""
    here = place(method="fedavg", rounds=1)
    here.serve()
    here.join("a", "--state-dir", "shared").until("here as a")
    assert "its own --state-dir" in here.join("b", "--state-dir", "shared").wait(code=2)


@pytest.mark.slow
def test_a_lost_state_directory_is_recorded(place: Callable[..., Place], tmp_path: Path) -> None:
    """Finding 6: a state directory lost in the middle of a run gave wrong results and exit code 0."""
    import shutil

    here = place(method="scaffold", rounds=4, local={"lr": 0.1, "batch": 1, "epochs": 3})
    server = here.serve("--grace", "100")
    first, *_ = here.all()
    server.until("round 1/4")
    first.kill()
    shutil.rmtree(here.folder / "state-a")
    here.join("a")
    server.wait()
    reasons = {f["reason"] for f in here.failures() if f["node"] == "a"}
    assert any("another state directory" in r for r in reasons)
    assert any("Mistake" in r for r in reasons)
    assert here.rounds()[-1]["participants"] == ["b", "c"]
    assert json.loads((here.folder / "run/summary.json").read_text())["failures"] > 0
