"""Mistakes with certificates, configurations and addresses: one sentence, exit code 2, no traceback, before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kilter.net import enrolment, tls

Run = Callable[..., tuple[int, str, str]]
HUB = 'tls = "certs/server"\nsites = ["a"]\nlisten = "127.0.0.1:0"\n'
SITE = 'hub = "127.0.0.1:9"\ntls = "certs/a"\ndata = "rows.npz"\n'
EXPERIMENT = 'method = "fedavg"\ndata = "digits"\nmodel = "linear"\nrounds = 1\n'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with certificates of every kind, and an experiment."""
    tls.new(tmp_path / "certs", ["server:server", "a:site", "b:site", "alice:submitter"])
    tls.new(tmp_path / "expired", ["a:site"], days=-1)
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    return tmp_path


def one_sentence(result: tuple[int, str, str]) -> str:
    code, out, error = result
    assert code == 2, out + error
    assert error.startswith("kilter: "), error
    assert error.count("\n") == 1
    assert error.endswith(".\n")
    return error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "lacks the setting tls"),
        (HUB.replace("127.0.0.1:0", "abc"), "'abc' is not an address: write HOST:PORT"),
        (HUB.replace('"127.0.0.1:0"', "3"), "listen in hub.toml takes a text"),
        (HUB.replace("certs/server", "certs/a"), "states the role site: use one with the role server"),
        (HUB.replace("certs/server", "nowhere"), "must hold key.pem, cert.pem and ca.pem"),
        (HUB + 'metrics = "x"\n', "'x' is not an address"),
        (HUB + 'metrics = "0.0.0.0:0"\n', "Metrics are served on this machine only"),
        (HUB + 'state = "e.toml/x"\n', "Not a directory: check the path and its permissions"),
        (HUB + 'revoked = "none"\n', "The revocation list .* cannot be read"),
        (HUB + "[data]\nx = 3\n", "takes a table of texts"),
    ],
)
def test_a_hub_that_cannot_run(kilter: Run, here: Path, settings: str, message: str) -> None:
    (here / "hub.toml").write_text(settings)
    code, out, error = kilter("hub", "run", "--config", "hub.toml")
    assert (code, out) == (2, ""), error
    assert error.count("\n") == 1
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SITE.replace("127.0.0.1:9", "hub"), "'hub' is not an address: write HOST:PORT"),
        (SITE.replace("127.0.0.1:9", "hub:0"), "not the address of a server"),
        (SITE.replace("certs/a", "certs/alice"), "states the role submitter: use one with the role site"),
        (SITE.replace("certs/a", "expired/a"), "expired on"),
        (SITE + 'metrics = "x"\n', "'x' is not an address"),
    ],
)
def test_an_agent_that_cannot_run(kilter: Run, here: Path, settings: str, message: str) -> None:
    (here / "site.toml").write_text(settings)
    assert message in one_sentence(kilter("site", "run", "--config", "site.toml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "none.toml"], "'none.toml' cannot be read"),
        (["submit", "e.toml"], "The hub '127.0.0.1:9' does not answer"),
        (["jobs"], "does not answer"),
        (["jobs", "3"], "does not answer"),
        (["logs", "3"], "does not answer"),
        (["fetch", "3"], "does not answer"),
        (["cancel", "3"], "does not answer"),
        (["jobs", "--hub", "abc"], "'abc' is not an address: write HOST:PORT"),
        (["jobs", "--tls", "nowhere"], "must hold key.pem, cert.pem and ca.pem"),
        (["jobs", "--tls", "expired/a"], "expired on"),
    ],
)
def test_a_submitter_without_a_hub(
    kilter: Run, here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("KILTER_HUB", "127.0.0.1:9")
    monkeypatch.setenv("KILTER_TLS", "certs/alice")
    assert message in one_sentence(kilter(*words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "e.toml", "--tls", "certs/a", "--sites", "a"], "states the role site: use one with the role server"),
        (["serve", "e.toml", "--insecure", "--sites", "a,a"], "names a site twice"),
        (["join", "--server", "abc", "--data", "digits", "--tls", "certs/a"], "'abc' is not an address"),
        (["join", "--server", "127.0.0.1:9", "--data", "digits", "--insecure", "--name", "../a"], "cannot be a site's name"),
        (["status", "--server", "abc", "--tls", "certs/a"], "'abc' is not an address"),
        (["certs", "new", "--out", "more", "--names", ""], "Give the names"),
        (["certs", "new", "--out", "more", "--names", "x,x"], "each once"),
        (["certs", "new", "--out", "certs", "--names", "a"], "exists already"),
        (["certs", "install", "certs/a", "--to", "certs/b"], "was made for another key"),
        (["certs", "revoke", "none.pem", "--authority", "certs"], "'none.pem' cannot be read"),
        (["approve", "deadbeef"], "is not a digest of terms"),
        (["audit"], "There is no audit log"),
        (["audit", "--state-dir", "e.toml"], "There is no audit log"),
    ],
)  # fmt: skip
def test_other_commands_of_a_network(kilter: Run, here: Path, words: list[str], message: str) -> None:
    assert message in one_sentence(kilter(*words))


def test_a_dry_run_says_that_the_server_does_not_answer(
    kilter: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kilter.net.dry_run.PATIENCE", 0.5)
    monkeypatch.setattr("kilter.net.limits.limit_memory", lambda megabytes: None)  # they would stay with this process
    monkeypatch.setattr("kilter.net.limits.limit_processes", lambda count: None)
    words = ["join", "--server", "127.0.0.1:9", "--data", "digits", "--insecure", "--name", "a", "--dry-run"]
    code, out, error = kilter(*words)
    assert code == 2
    assert "Asking 127.0.0.1:9 for its terms" in out
    assert "'127.0.0.1:9' did not answer within 0 seconds" in error


def test_approve_says_what_waits_and_what_does_not(kilter: Run, here: Path) -> None:
    assert kilter("approve")[1] == "Nothing is approved, and nothing waits for an approval, in 'kilter-state'.\n"
    digest = "0123456789abcdef" * 2
    _, out, _ = kilter("approve", digest)
    assert "No terms with this digest wait in 'kilter-state'; the approval is for later." in out
    assert f"{digest}  " in out
    assert "No terms" not in kilter("approve")[1]


def test_the_doctor_checks_the_role_and_the_device_of_an_agent(kilter: Run, here: Path) -> None:
    (here / "site.toml").write_text(SITE.replace("certs/a", "certs/alice") + 'device = "gpu"\n')
    code, out, _ = kilter("doctor", "--config", "site.toml")
    assert code == 1
    assert "fix  key and certificate: The certificate of 'alice' states the role submitter" in out
    assert "fix  device: 'gpu' is not a device" in out


@pytest.mark.parametrize("swap", ["key.pem", "cert.pem"])
def test_the_doctor_notices_swapped_files(kilter: Run, here: Path, swap: str) -> None:
    os.replace(here / "certs/b" / swap, here / "certs/a" / swap)
    code, out, _ = kilter("doctor", "--tls", "certs/a")
    assert code == 1
    assert "do not belong together" in out


def test_a_request_for_another_name_is_not_signed(kilter: Run, here: Path) -> None:
    enrolment.authority(here / "authority", "study", None, 900)
    enrolment.request("c", here / "c")
    words = ["certs", "sign", "c/request.pem", "--authority", "authority", "--out", "signed", "--name"]
    assert "'c'" in one_sentence(kilter(*words, "d"))
    assert not (here / "signed").exists()
    assert kilter(*words, "c")[0] == 0
