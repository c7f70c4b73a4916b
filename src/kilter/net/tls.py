"""Mutual TLS, and names from certificates: a site's identity is the name in its certificate.

An identity is a folder of three files: `key.pem`, `cert.pem` and `ca.pem` (the authority to trust). `kilter certs new` makes them
for a trial; an institution puts its own there.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kilter.errors import Mistake, unknown

log = logging.getLogger("kilter.net")

DAYS = 365
WARNING_DAYS = 30  # before a certificate expires
ROLES = ("server", "site", "submitter", "observer")
ROLE_PREFIX = "kilter:"  # of the organisational unit that states a role
FILES = ("key.pem", "cert.pem", "ca.pem")
USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True)
class Identity:
    """A key, its certificate, and the authority whose certificates are trusted."""

    name: str
    key: bytes
    cert: bytes
    ca: bytes
    expires: datetime | None = None
    folder: Path | None = None  # where it was read, and is read again when it is renewed

    def days_left(self) -> float | None:
        """Days until the certificate expires, where that is known."""
        return None if self.expires is None else (self.expires - datetime.now(UTC)).total_seconds() / 86400

    @staticmethod
    def read(folder: Path, files: Sequence[str] = FILES, strict: bool = True) -> Identity:
        """From a folder with key.pem, cert.pem and ca.pem, or files of other names. `strict`: the key must be private."""
        try:
            key, cert, ca = ((folder / name).read_bytes() for name in files)
        except OSError as e:
            raise Mistake(
                f"--tls '{folder}' must hold {files[0]}, {files[1]} and {files[2]}, but {Path(e.filename).name}: {e.strerror}."
            ) from None
        if strict:
            check_private(folder / files[0])
        try:
            certificate = x509.load_pem_x509_certificate(cert)
        except ValueError:
            raise Mistake(f"'{folder / files[1]}' is not a certificate in PEM format.") from None
        if certificate.not_valid_after_utc < datetime.now(UTC):
            raise Mistake(
                f"The certificate in '{folder}' expired on {certificate.not_valid_after_utc:%Y-%m-%d}: renew it."
            )
        renewable = folder if tuple(files) == FILES and strict else None
        read = Identity(holder(certificate), key, cert, ca, certificate.not_valid_after_utc, renewable)
        if (left := read.days_left()) is not None and left < WARNING_DAYS:
            log.warning(
                "the certificate of %s expires in %.0f days, on %s: renew it",
                read.name,
                left,
                f"{read.expires:%Y-%m-%d}",
            )
        return read

    def renewed(self) -> Identity:
        """This identity as its folder has it now. A folder that cannot be used changes nothing, and is logged."""
        if self.folder is None:
            return self
        try:
            if (self.folder / FILES[1]).read_bytes() == self.cert:
                return self
            fresh = Identity.read(self.folder)
        except (Mistake, OSError) as e:
            log.warning("the certificate stays as it was: %s", e)
            return self
        if fresh.name != self.name:
            log.warning("the certificate in '%s' is now for '%s': restart to use it", self.folder, fresh.name)
            return self
        log.info("the certificate of %s was renewed", fresh.name)
        return fresh

    def for_server(self) -> grpc.ServerCredentials:
        """For a port: show my certificate, and require one of every caller. A renewed certificate is used from then on."""
        if self.folder is None:
            return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)
        latest = [self]

        def configuration() -> grpc.ServerCertificateConfiguration | None:
            """Called at every handshake; None: nothing has changed."""
            fresh = latest[0].renewed()
            if fresh is latest[0]:
                return None
            latest[0] = fresh
            return grpc.ssl_server_certificate_configuration([(fresh.key, fresh.cert)], fresh.ca)

        first = grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)
        return grpc.dynamic_ssl_server_credentials(first, configuration, require_client_authentication=True)

    def for_client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


class ExpiryWatch:
    """Warns in the log, once a day, that a certificate expires soon: for processes that run for months."""

    def __init__(self) -> None:
        self._warned = -math.inf

    def look(self, name: str, days_left: float | None) -> None:
        now = time.monotonic()
        if days_left is not None and days_left < WARNING_DAYS and now - self._warned >= 86400:
            self._warned = now
            log.warning("the certificate of %s expires in %.0f days: renew it", name, days_left)


def check_private(path: Path) -> None:
    """Refuse a key that others on this machine can read or change."""
    if path.stat().st_mode & 0o077:
        raise Mistake(f"Others can read or change the key '{path}': make it private (chmod 600) before you use it.")


def holder(cert: x509.Certificate) -> str:
    """The name in a certificate: its common name, or its only alternative name."""
    common = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if common:
        return str(common[0].value)
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    dns = names.get_values_for_type(x509.DNSName)
    return dns[0] if len(dns) == 1 else ""


def role(cert: x509.Certificate) -> str:
    """The role in a certificate: server, site, submitter or observer; empty if it states none."""
    units = cert.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    stated = [str(u.value).removeprefix(ROLE_PREFIX) for u in units if str(u.value).startswith(ROLE_PREFIX)]
    return stated[0] if len(stated) == 1 else ""


def check_role(identity: Identity, wanted: str) -> None:
    """Refuse a certificate that states another role than the one it is used for; one without a role may do both."""
    stated = role(x509.load_pem_x509_certificate(identity.cert))
    if stated not in ("", wanted):
        raise Mistake(f"The certificate of '{identity.name}' states the role {stated}: use one with the role {wanted}.")


def caller(context: Any) -> str:
    """The name in the caller's certificate, by the same rule; empty without a certificate."""
    properties = context.auth_context()
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        values = properties.get(key, ())
        if len(values) == 1:
            return str(values[0].decode(errors="replace"))
    return ""


def peer_certificate(context: Any) -> x509.Certificate | None:
    """The caller's certificate; None without TLS."""
    values = context.auth_context().get("x509_pem_cert", ())
    return x509.load_pem_x509_certificate(values[0]) if values else None


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from this machine only.

    >>> is_loopback("127.0.0.1:9443"), is_loopback("0.0.0.0:9443")
    (True, False)
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def identity(tls: Path | None, insecure: bool, address: str, role: str = "") -> Identity | None:
    """The identity to use at this address, for this role if one is given; None only on loopback and with --insecure."""
    if tls is not None:
        read = Identity.read(tls)
        if role:
            check_role(read, role)
        return read
    if not insecure:
        raise Mistake("Mutual TLS is always on: give --tls FOLDER (`kilter certs new` makes one for a trial).")
    if not is_loopback(address):
        raise Mistake(f"--insecure is for a trial on one machine (127.0.0.1), not for '{address}': give --tls.")
    return None


def words(text: str) -> list[str]:
    """a,b,c as a list."""
    return [w.strip() for w in text.split(",") if w.strip()]


# Certificates for a trial ---------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """A name in a certificate must be plain."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise Mistake(f"'{name}' cannot be a name: use letters, digits, '-', '_' and '.', at most 64.")


def new(out: Path, names: Sequence[str], days: int = DAYS) -> list[Path]:
    """Make an authority in `out` (or use the one there), and for each NAME or NAME:ROLE a folder `out/NAME`."""
    roles = dict(text.partition(":")[::2] for text in names)
    if not names or len(roles) < len(names):
        raise Mistake("Give the names of those who get a certificate, each once: server,hospital-a,hospital-b.")
    for name, role in roles.items():
        check_name(name)
        if role not in ("", *ROLES):
            raise unknown("role", role, ROLES)
    out.mkdir(parents=True, exist_ok=True)
    if (out / "ca.key.pem").exists():
        ca_key = serialization.load_pem_private_key((out / "ca.key.pem").read_bytes(), None)
        ca = x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    else:
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = certify("kilter trial authority", ca_key.public_key(), None, ca_key, days)
        write_secret(out / "ca.key.pem", pem_of(ca_key))
        (out / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    folders = []
    for name, role in roles.items():
        folder = out / name
        if folder.exists():
            raise Mistake(f"'{folder}' exists already: remove it first, or choose another --out.")
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        cert = certify(name, key.public_key(), ca, ca_key, days, role=role)
        write_secret(folder / "key.pem", pem_of(key))
        (folder / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        (folder / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        folders.append(folder)
    return folders


def write_secret(path: Path, data: bytes) -> None:
    """A file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
        f.write(data)


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certify(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    sign: ec.EllipticCurvePrivateKey,
    days: int,
    *,
    role: str = "",
    authority: bool = False,
    depth: int = 0,
) -> x509.Certificate:
    """A certificate for a key. Without an issuer it is a root; `depth` is how many authorities may stand below an authority."""
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if role:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, ROLE_PREFIX + role))
    subject = x509.Name(parts)
    now = datetime.now(UTC)
    begin = min(now - timedelta(hours=1), now + timedelta(days=days - 1))  # negative days: expired, for tests
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(sign.public_key())
    extensions: list[tuple[x509.ExtensionType, bool]]
    if authority or issuer is None:
        usage = {**dict.fromkeys(USAGES, False), "key_cert_sign": True, "crl_sign": True}
        extensions = [
            (x509.BasicConstraints(ca=True, path_length=depth), True),
            (x509.KeyUsage(**usage), True),
            (x509.SubjectKeyIdentifier.from_public_key(key), False),
            *([] if issuer is None else [(above, False)]),
        ]
    else:
        extensions = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.KeyUsage(**{**dict.fromkeys(USAGES, False), "digital_signature": True}), True),
            (above, False),
            (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + timedelta(days=days))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(sign, hashes.SHA256())
