"""Revocation lists: certificates that an authority has withdrawn. The file is read again when it changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from kilter.errors import Mistake
from kilter.net import enrolment, tls
from kilter.records.files import write

log = logging.getLogger("kilter.net")
VALID_DAYS = 3650  # a list stays in force until a newer one replaces it


class RevocationList:
    """The serial numbers on a list that an authority signed. A list that becomes unreadable changes nothing, and is logged."""

    def __init__(self, path: Path, authorities: Sequence[x509.Certificate]) -> None:
        self.path, self._authorities = path, authorities
        self._changed = 0.0
        self._serials: frozenset[int] = frozenset()
        self._read()

    def _read(self) -> None:
        try:
            changed = self.path.stat().st_mtime
        except OSError as e:
            raise Mistake(f"The revocation list '{self.path}' cannot be read: {e.strerror}.") from None
        listed = read_list(self.path)
        if not any(_signed_by(listed, authority) for authority in self._authorities):
            raise Mistake(f"The revocation list '{self.path}' was not signed by an authority that is trusted here.")
        self._changed, self._serials = changed, frozenset(entry.serial_number for entry in listed)

    def has(self, serial: int) -> bool:
        """Whether a certificate with this serial number is on the list, as the file is now."""
        try:
            if self.path.stat().st_mtime != self._changed:
                self._read()
        except (Mistake, OSError) as e:
            log.warning("the last revocation list stays in force: %s", e)
        return serial in self._serials


def revocation_list(path: Path | None, identity: tls.Identity | None) -> RevocationList | None:
    """The list at this path, signed by an authority of this identity's chain; None without a path."""
    if path is None:
        return None
    if identity is None:
        raise Mistake("--revoked needs --tls: without certificates there is nothing to revoke.")
    chain = x509.load_pem_x509_certificates(identity.cert)[1:]
    return RevocationList(path, [*chain, *x509.load_pem_x509_certificates(identity.ca)])


def read_list(path: Path) -> x509.CertificateRevocationList:
    try:
        return x509.load_pem_x509_crl(path.read_bytes())
    except OSError as e:
        raise Mistake(f"The revocation list '{path}' cannot be read: {e.strerror}.") from None
    except ValueError:
        raise Mistake(f"'{path}' is not a revocation list in PEM format.") from None


def _signed_by(listed: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    return isinstance(key, ec.EllipticCurvePublicKey) and listed.is_signature_valid(key)


def revoke(certificate_file: Path, folder: Path) -> Path:
    """Add a certificate to the list of the authority that signed it; where the list is."""
    key, chain, _ = enrolment.read_authority(folder)
    (certificate, *_) = enrolment.read_certificates(certificate_file)
    if certificate.issuer != chain[0].subject:
        raise Mistake(f"'{certificate_file}' was signed by another authority than '{folder}'.")
    path, now = folder / "revoked.pem", datetime.now(UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(chain[0].subject)
        .last_update(now)
        .next_update(now + timedelta(days=VALID_DAYS))
    )
    before = list(read_list(path)) if path.exists() else []
    for entry in before:
        builder = builder.add_revoked_certificate(entry)
    if certificate.serial_number not in {entry.serial_number for entry in before}:
        entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(now).build()
        builder = builder.add_revoked_certificate(entry)
    write(path, builder.sign(key, hashes.SHA256()).public_bytes(enrolment.PEM))
    return path
