"""Letters from site to site that pass through a server which can neither read, alter, replay nor misdeliver them unnoticed.

Every site has an X25519 key and a card: its public key, signed with the key of its TLS certificate, which is attached. Sender and
receiver derive a key for a single letter that nobody else can derive: HKDF over their shared secret, a fresh salt, and the
letter's place (run, session, round, call, step, sender, receiver). The letter is then sealed with ChaCha20-Poly1305.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from torch import Tensor

from kilter.core import Tree
from kilter.errors import Mistake
from kilter.net.messages import Card, Order
from kilter.net.tls import Identity, check_private, holder
from kilter.records import wire

SALT, NONCE = 16, bytes(12)  # every key seals one letter, so the nonce need not vary


class Seal:
    """A site's key for sealed letters, and the keys of others that were proved."""

    def __init__(self, name: str, identity: Identity | None, folder: Path) -> None:
        self.name, self.identity = name, identity
        self._key = _own_key(folder / "seal.key")
        self._known: dict[str, tuple[Card, X25519PublicKey]] = {}  # by name: the card, and the key it proves

    def card(self) -> Card:
        """My public key, and the proof that it is mine."""
        public = self._key.public_key().public_bytes_raw()
        text = base64.b64encode(public).decode()
        if self.identity is None:
            return Card(text)
        signature = base64.b64encode(_sign(self.identity.key, _claim(self.name, public))).decode()
        return Card(text, self.identity.cert.decode(), signature)

    def close(self, letter: Tree, to: str, cards: Mapping[str, Card], order: Order) -> Tensor:
        """Seal a letter for one receiver, written for this order."""
        sealed = self.close_bytes(wire.encode(letter), to, cards.get(to), _context(order, self.name, to))
        return torch.frombuffer(bytearray(sealed), dtype=torch.uint8)

    def close_bytes(self, data: bytes, to: str, card: Card | None, context: bytes) -> bytes:
        """Seal bytes for one receiver; they open only in this context."""
        salt = os.urandom(SALT)
        return salt + self._between(to, card, salt, context).encrypt(NONCE, data, None)

    def open(self, sealed: Tree, sender: str, cards: Mapping[str, Card], order: Order) -> Tree:
        """What this sender wrote to me for this order; `Malformed` if it did not."""
        if not isinstance(sealed, Tensor) or sealed.dtype != torch.uint8 or sealed.ndim != 1 or len(sealed) < SALT + 16:
            raise wire.Malformed(f"a letter from {sender} is not sealed")
        context = _context(order, sender, self.name)
        return wire.decode(self.open_bytes(sealed.numpy().tobytes(), sender, cards.get(sender), context))

    def open_bytes(self, sealed: bytes, sender: str, card: Card | None, context: bytes) -> bytes:
        """The bytes that this sender sealed for me in this context; `Malformed` if it did not."""
        key = self._between(sender, card, sealed[:SALT], context)
        try:
            return key.decrypt(NONCE, sealed[SALT:], None)
        except (InvalidTag, ValueError):
            raise wire.Malformed(f"a letter from {sender} was altered, replayed or misdelivered") from None

    def _between(self, other: str, card: Card | None, salt: bytes, context: bytes) -> ChaCha20Poly1305:
        try:
            secret = self._key.exchange(self._public(other, card))
        except ValueError:  # a key that makes every shared secret zero
            raise wire.Malformed(f"{other} has no key that can be trusted") from None
        return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, salt, context).derive(secret))

    def _public(self, name: str, card: Card | None) -> X25519PublicKey:
        """The key on this card, once it is proved to be this site's."""
        if name == self.name:
            return self._key.public_key()
        known = self._known.get(name)
        if known and known[0] == card:
            return known[1]
        try:
            if card is None:
                raise InvalidSignature
            public = base64.b64decode(card.public, validate=True)
            if self.identity:
                signature = base64.b64decode(card.signature, validate=True)
                _verify(self.identity.ca, card.cert.encode(), signature, name, _claim(name, public))
            key = X25519PublicKey.from_public_bytes(public)
        except (LookupError, TypeError, ValueError, AttributeError, InvalidSignature, VerificationError):
            raise wire.Malformed(f"{name} has no key that can be trusted") from None
        self._known[name] = card, key
        return key


def _own_key(path: Path) -> X25519PrivateKey:
    """Kept at the site, so that letters written to it before a restart can still be opened."""
    if path.exists():
        check_private(path)
        try:
            return X25519PrivateKey.from_private_bytes(path.read_bytes())
        except ValueError:
            raise Mistake(
                f"'{path}' is damaged: restore the state directory from a backup, or use a new one."
            ) from None
    key = X25519PrivateKey.generate()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(key.private_bytes_raw())
    return key


def _context(order: Order, sender: str, receiver: str) -> bytes:
    place = [order.run, order.session, order.round, order.seq, str(order.step)]
    return json.dumps(["kilter letter", *place, sender, receiver]).encode()


def _claim(name: str, public: bytes) -> bytes:
    return json.dumps(["kilter card", name, public.hex()]).encode()


def _sign(key: bytes, claim: bytes) -> bytes:
    private = serialization.load_pem_private_key(key, None)
    if isinstance(private, ec.EllipticCurvePrivateKey):
        return private.sign(claim, ec.ECDSA(hashes.SHA256()))
    if isinstance(private, ed25519.Ed25519PrivateKey):
        return private.sign(claim)
    if isinstance(private, rsa.RSAPrivateKey):
        return private.sign(claim, padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.MAX_LENGTH), hashes.SHA256())
    raise Mistake("The key in --tls is of a kind that cannot sign: use an elliptic-curve, Ed25519 or RSA key.")


def _verify(ca: bytes, cert: bytes, signature: bytes, name: str, claim: bytes) -> None:
    """Check that the authority issued this certificate to this name, and that its key signed the claim."""
    leaf, *chain = x509.load_pem_x509_certificates(cert)
    PolicyBuilder().store(Store(x509.load_pem_x509_certificates(ca))).build_client_verifier().verify(leaf, chain)
    if holder(leaf) != name:
        raise InvalidSignature
    key = leaf.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, claim, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, claim)
    elif isinstance(key, rsa.RSAPublicKey):
        pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.MAX_LENGTH)
        key.verify(signature, claim, pss, hashes.SHA256())
    else:
        raise InvalidSignature
