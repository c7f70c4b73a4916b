"""`kilter doctor`: what could go wrong at this site, checked before it does, with what to do about each problem."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cryptography import x509

from kilter.errors import Mistake
from kilter.net import tls
from kilter.net.enrolment import check_chain
from kilter.net.policy import SitePolicy
from kilter.net.ports import split_address

DISK_BYTES = 1e9  # free space that a state directory should have
SKEW_SECONDS = 120.0  # that clocks may differ
CONNECT_SECONDS = 10.0
PACKAGES = ("torch", "grpcio", "cryptography", "numpy", "safetensors")


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. `fix` says what to do, where `text` does not say it already."""

    check: str
    text: str
    fix: str = ""
    failed: bool = False

    @property
    def ok(self) -> bool:
        return not (self.fix or self.failed)


def examine(
    folder: Path | None,
    server: str,
    server_name: str,
    state_dir: Path,
    policy: Path | None,
    data: str,
    role: str = "",
    device: str = "cpu",
) -> Iterator[Finding]:
    """Check versions, clock, keys, certificate, reachability, disk, policy, data and device. `role`: that of the certificate."""
    yield _versions()
    yield _clock()
    if folder is not None:
        yield _try("key and certificate", lambda: _identity(folder, role))
    if server:
        yield _try("server", lambda: _reach(server, server_name, folder))
    yield _try("state directory", lambda: _disk(state_dir))
    yield _try("policy", lambda: _policy(policy))
    if data:
        yield _try("data", lambda: _data(data))
    if device != "cpu":
        yield _try("device", lambda: _device(device))


def _try(check: str, action: Callable[[], Finding]) -> Finding:
    try:
        return action()
    except Mistake as e:
        return Finding(check, str(e), failed=True)
    except OSError as e:
        return Finding(check, f"{e.strerror or e}", "check the path and its permissions")


def _versions() -> Finding:
    installed = []
    for package in PACKAGES:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return Finding("versions", f"{package} is not installed", "pip install 'kilter[net]'")
    return Finding("versions", f"python {platform.python_version()}, {', '.join(installed)}")


def _clock() -> Finding:
    now = time.time()
    if now < 1_735_000_000:  # the end of 2024: before this program was written
        return Finding("clock", f"this machine says {time.ctime(now)}", "set the clock, for example with NTP")
    return Finding("clock", time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)))


def _identity(folder: Path, role: str) -> Finding:
    identity = tls.Identity.read(folder)
    if role:
        tls.check_role(identity, role)
    chain = x509.load_pem_x509_certificates(identity.cert)
    check_chain(chain, x509.load_pem_x509_certificates(identity.ca)[0])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    except ssl.SSLError:
        raise Mistake(
            f"The key and the certificate in '{folder}' do not belong together: install them again."
        ) from None
    left = identity.days_left() or 0.0
    stated = tls.role(chain[0])
    text = f"{identity.name}{f' ({stated})' if stated else ''}, valid for {left:.0f} more days"
    if left < tls.WARNING_DAYS:
        return Finding("key and certificate", text, "renew it: kilter certs request, sign, install")
    return Finding("key and certificate", text)


def _reach(server: str, server_name: str, folder: Path | None) -> Finding:
    host, port = split_address(server)
    began = time.perf_counter()
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as e:
        text = f"'{server}' cannot be reached: {e.strerror or e}"
        return Finding("server", text, "check the address, the firewall (outgoing TCP), and that the server runs")
    with connection:
        milliseconds = 1000 * (time.perf_counter() - began)
        if folder is None:
            return Finding("server", f"'{server}' answers in {milliseconds:.0f} ms; TLS was not tried (no --tls)")
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(connection, server_hostname=server_name) as secure:
                secure.settimeout(2.0)
                with suppress(TimeoutError):
                    secure.recv(1)  # with TLS 1.3 a server refuses a certificate after the handshake
        except ssl.SSLCertVerificationError as e:
            return Finding(
                "server", f"its certificate is refused: {e.verify_message}", "check ca.pem and --server-name"
            )
        except (ssl.SSLError, OSError) as e:
            return Finding(
                "server", f"it refuses this site: {e}", "ask the server's operator which authority it trusts"
            )
    return Finding("server", f"'{server}' answers in {milliseconds:.0f} ms and accepts this certificate")


def _disk(folder: Path) -> Finding:
    there = folder
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        return Finding(
            "state directory", f"'{there}' cannot be written", "choose another --state-dir, or change its owner"
        )
    free = shutil.disk_usage(there).free
    text = f"'{folder}': {free / 1e9:.1f} GB free"
    if free < DISK_BYTES:
        return Finding("state directory", text, "free some space: a state needs a few copies of the model")
    if folder.exists() and folder.stat().st_mode & 0o077:
        return Finding("state directory", f"others can read '{folder}'", f"chmod 700 {folder}")
    return Finding("state directory", text)


def _policy(path: Path | None) -> Finding:
    policy = SitePolicy.read(path)
    words = f"'{path}'" if path else "the built-in policy"
    return Finding("policy", f"{words}: approval by {policy.approval}")


def _device(name: str) -> Finding:
    from kilter.runtimes.devices import describe, parse

    return Finding("device", describe(parse(name)))


def _data(path: str) -> Finding:
    from kilter.data import load

    dataset = load(path, prepare=False)
    return Finding("data", f"'{path}': {len(dataset.train)} training rows, {len(dataset.classes)} classes")
