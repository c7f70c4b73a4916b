"""Enrolment: a site makes its key and a signing request, an authority signs it, the site installs the certificate.

The key never leaves the site. The authority and the site compare a fingerprint (by telephone, say) before the authority signs. An
authority may itself be signed by another one: certificates then carry the chain, and everybody trusts the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kilter.errors import Mistake
from kilter.net import tls
from kilter.records.files import write

Role = Literal["server", "site", "submitter", "observer"]
PEM = serialization.Encoding.PEM


def request(name: str, folder: Path) -> str:
    """Make a key and a signing request in a folder; the fingerprint to compare. A key that is there is used again."""
    tls.check_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "key.pem").exists():
        tls.check_private(folder / "key.pem")
        key = _key(folder / "key.pem")
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        tls.write_secret(folder / "key.pem", tls.pem_of(key))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signed = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    write(folder / "request.pem", signed.public_bytes(PEM))
    return fingerprint(signed)


def fingerprint(signed: x509.CertificateSigningRequest) -> str:
    """Sixteen bytes of the hash of a request's public key, for people to read to each other."""
    data = signed.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(data)
    return ":".join(f"{byte:02x}" for byte in digest.finalize()[:16])


def authority(folder: Path, name: str, parent: Path | None, days: int) -> None:
    """Make an authority: a root, or one that a parent signs."""
    tls.check_name(name)
    if (folder / "ca.key.pem").exists():
        raise Mistake(f"'{folder}' is an authority already: choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    if parent is None:
        certificate = tls.certify(name, key.public_key(), None, key, days, authority=True, depth=1)
        chain, root = [certificate], certificate
    else:
        parent_key, parent_chain, root = read_authority(parent)
        certificate = tls.certify(name, key.public_key(), parent_chain[0], parent_key, days, authority=True)
        chain = [certificate, *(c for c in parent_chain if c != root)]
    tls.write_secret(folder / "ca.key.pem", tls.pem_of(key))
    write(folder / "chain.pem", b"".join(c.public_bytes(PEM) for c in chain))
    write(folder / "ca.pem", root.public_bytes(PEM))


def sign(request_file: Path, folder: Path, name: str, role: Role, days: int, out: Path) -> str:
    """Sign a request for this name and role into a folder with cert.pem and ca.pem; the fingerprint of the request."""
    if role not in get_args(Role):
        raise Mistake(f"'{role}' is not a role: use {', '.join(get_args(Role))}.")
    asked = read_request(request_file)
    if (wanted := requested_name(asked)) != name:
        raise Mistake(f"The request is for '{wanted}', not for '{name}': check who sent it.")
    public = asked.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise Mistake(f"'{request_file}' has a key of another kind: use a key on an elliptic curve.")
    if days < 1:
        raise Mistake(f"A certificate is valid for at least one day, not {days}.")
    key, chain, root = read_authority(folder)
    certificate = tls.certify(name, public, chain[0], key, days, role=role)
    out.mkdir(parents=True, exist_ok=True)
    whole = [certificate, *(c for c in chain if c != root)]
    write(out / "cert.pem", b"".join(c.public_bytes(PEM) for c in whole))
    write(out / "ca.pem", root.public_bytes(PEM))
    return fingerprint(asked)


def install(signed: Path, folder: Path) -> datetime:
    """Put a signed certificate next to its key, if it fits the key, its name and its authority; when it expires.

    This is also how a certificate is renewed: connections made from then on use the new one.
    """
    key = _key(folder / "key.pem")
    chain, root = read_certificates(signed / "cert.pem"), read_certificates(signed / "ca.pem")[0]
    own = chain[0]
    if _public(own.public_key()) != _public(key.public_key()):
        raise Mistake(f"The certificate in '{signed}' was made for another key than '{folder / 'key.pem'}'.")
    asked = folder / "request.pem"
    if asked.exists() and requested_name(read_request(asked)) != tls.holder(own):
        raise Mistake(f"The certificate in '{signed}' is for '{tls.holder(own)}', which was not requested.")
    check_chain(chain, root)
    write(folder / "cert.pem", (signed / "cert.pem").read_bytes())
    write(folder / "ca.pem", (signed / "ca.pem").read_bytes())
    return own.not_valid_after_utc


def check_chain(chain: Sequence[x509.Certificate], root: x509.Certificate) -> None:
    """Every certificate must be signed by the next, and the last by the root."""
    now = datetime.now(UTC)
    issuers = [*chain[1:], root]
    for certificate, issuer in zip(chain, issuers, strict=True):
        try:
            certificate.verify_directly_issued_by(issuer)
        except (InvalidSignature, ValueError, TypeError):
            raise Mistake(
                f"The certificate of '{tls.holder(certificate)}' was not signed by '{tls.holder(issuer)}'."
            ) from None
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc + timedelta(seconds=1):
            raise Mistake(
                f"The certificate of '{tls.holder(certificate)}' is valid from {certificate.not_valid_before_utc:%Y-%m-%d} "
                f"to {certificate.not_valid_after_utc:%Y-%m-%d}: renew it, or set the clock."
            )


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """A signing request whose own signature fits."""
    try:
        request = x509.load_pem_x509_csr(path.read_bytes())
        sound = request.is_signature_valid
    except OSError as e:
        raise Mistake(f"'{path}' cannot be read: {e.strerror}.") from None
    except ValueError:
        raise Mistake(f"'{path}' is not a signing request: `kilter certs request` makes one.") from None
    if not sound:
        raise Mistake(f"'{path}' was altered: its signature does not fit. Ask for a new request.")
    return request


def requested_name(request: x509.CertificateSigningRequest) -> str:
    """The name that a request asks for."""
    return ", ".join(str(a.value) for a in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME))


def read_authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, list[x509.Certificate], x509.Certificate]:
    """Its key, its certificate with the chain above it, and the root."""
    key = _key(folder / "ca.key.pem")
    chain = folder / "chain.pem"
    certificates = read_certificates(chain if chain.exists() else folder / "ca.pem")
    return key, certificates, read_certificates(folder / "ca.pem")[0]


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as e:
        raise Mistake(f"'{path}' cannot be read: {e.strerror}.") from None
    except (ValueError, TypeError):
        raise Mistake(f"'{path}' is not a private key in PEM format without a password.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Mistake(f"'{path}' is a key of another kind: use a key on an elliptic curve.")
    return key


def read_certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as e:
        raise Mistake(f"'{path}' cannot be read: {e.strerror}.") from None
    except ValueError:
        raise Mistake(f"'{path}' is not a certificate in PEM format.") from None


def _public(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
