"""The files `hub.toml` and `site.toml`. Paths in them are relative to the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import tomli_w

from kilter.errors import Malformed, Mistake, unknown
from kilter.net.names import check_name
from kilter.net.ports import check_server_address
from kilter.options import TABLE_FILES, TABLE_SETTINGS
from kilter.records.files import write
from kilter.records.toml_file import read_toml

LONGEST_KEEP = 100_000  # days


@dataclass(frozen=True)
class HubConfig:
    """How a hub runs."""

    tls: Path  # folder with key.pem, cert.pem and ca.pem
    sites: tuple[str, ...]  # names of the sites that may connect; a run takes part of them, or all
    listen: str = "0.0.0.0:9443"
    state: Path = Path("hub-state")  # the queue and the run folders
    parallel: int = 2  # runs at the same time
    patience: float = 60.0  # seconds before a run that lost its quorum makes room for others
    data: Mapping[str, str] = field(default_factory=dict)  # the hub's own data by name: common test sets, public rows
    revoked: Path | None = None  # the authority's list of revoked certificates
    metrics: str = ""  # HOST:PORT of metrics and health checks
    metrics_tls: Path | None = None  # folder with key.pem and cert.pem: serve metrics over HTTPS
    metrics_token: Path | None = None  # file with the token that a request for metrics must carry
    largest: int = 2**31  # bytes in a letter
    keep: float = 365.0  # days to keep the files of a job after its end; 0: forever

    def __post_init__(self) -> None:
        if not self.sites:
            raise Mistake('hub.toml must list the sites that may connect: sites = ["hospital-a", ...].')
        for name in self.sites:
            try:
                check_name(name)
            except Malformed as e:
                raise Mistake(f"sites of hub.toml: {e}.") from None
        if len(set(self.sites)) < len(self.sites):
            raise Mistake("sites of hub.toml names a site twice.")
        _check_range("parallel", self.parallel, 1)
        _check_range("patience", self.patience, 0)
        _check_range("largest", self.largest, 1)
        _check_range("keep", self.keep, 0, LONGEST_KEEP)


@dataclass(frozen=True)
class SiteConfig:
    """How a site's agent runs."""

    hub: str  # HOST:PORT
    tls: Path  # folder with key.pem, cert.pem and ca.pem
    data: str  # this site's rows: a file or folder
    hub_name: str = "server"  # the name in the hub's certificate
    state: Path = Path("kilter-state")  # approvals, audit logs, and what methods keep here
    parallel: int = 1  # runs at the same time
    policy: Path | None = None  # None: the built-in policy
    device: str = "cpu"
    table: Mapping[str, str] = field(default_factory=dict)  # how to read a table: see `kilter join --help`
    weights: str = ""  # this site's copy of pre-trained weights
    metrics: str = ""
    metrics_tls: Path | None = None
    metrics_token: Path | None = None

    def __post_init__(self) -> None:
        check_server_address(self.hub)
        _check_range("parallel", self.parallel, 1)
        for name in self.table:
            if name not in TABLE_SETTINGS:
                raise unknown("option in [table] of site.toml", name, TABLE_SETTINGS)


def _check_range(name: str, value: float, least: float, most: float = math.inf) -> None:
    if not (least <= value <= most and value < math.inf):  # false for NaN, too
        words = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        raise Mistake(f"{name} must be a number {words}, not {value}.")


Config = TypeVar("Config", HubConfig, SiteConfig)


def read_hub(path: Path) -> HubConfig:
    return _fill(HubConfig, read_toml(path), path)


def read_site(path: Path) -> SiteConfig:
    """The agent's configuration. A table [policy] in it is written to the state directory, as site processes read it there."""
    plain = read_toml(path)
    inline = plain.get("policy")
    if isinstance(inline, dict):
        state = path.parent / str(plain.get("state", SiteConfig.state))
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(state / "policy.toml", tomli_w.dumps(inline))
        plain = plain | {"policy": str((state / "policy.toml").absolute())}
    return _fill(SiteConfig, plain, path)


def _fill(kind: type[Config], plain: Mapping[str, object], path: Path) -> Config:
    known = {f.name: f for f in fields(kind)}
    for name in plain:
        if name not in known:
            raise unknown(f"setting in {path.name}", name, known)
    for name, each in known.items():
        if each.default is MISSING and each.default_factory is MISSING and name not in plain:
            raise Mistake(f"'{path}' lacks the setting {name}: see docs/how-to/hub.md.")
    values = {name: _value(name, str(known[name].type), value, path) for name, value in plain.items()}
    if kind is SiteConfig and "data" in values and (path.parent / str(values["data"])).exists():
        values["data"] = str((path.parent / str(values["data"])).absolute())
    for name, each in known.items():  # a default path is relative to the file, too
        if name not in values and isinstance(each.default, Path):
            values[name] = (path.parent / each.default).absolute()
    return kind(**values)  # type: ignore[arg-type]


def _value(name: str, kind: str, value: object, path: Path) -> object:
    """A setting with the type of its field."""
    where = f"{name} in {path.name}"
    if kind.startswith("Path") and isinstance(value, str):
        return (path.parent / value).absolute()
    if kind == "str" and isinstance(value, str):
        return value
    if kind in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if kind == "float" else int(value)
    if kind.startswith("tuple") and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if name == "table" and isinstance(value, dict) and all(isinstance(v, str | int | float) for v in value.values()):
        return {key: _existing(path, str(v)) if key in TABLE_FILES else str(v) for key, v in value.items()}
    if kind.startswith("Mapping") and isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return {key: _existing(path, text) for key, text in value.items()}
    wanted = {
        "Path": "a path",
        "str": "a text",
        "int": "a whole number",
        "float": "a number",
        "tuple": "a list of texts",
    }
    raise Mistake(f"{where} takes {next((w for k, w in wanted.items() if kind.startswith(k)), 'a table of texts')}.")


def _existing(path: Path, text: str) -> str:
    """A path relative to the file, if there is something; otherwise a name."""
    return str((path.parent / text).absolute()) if text and (path.parent / text).exists() else text
