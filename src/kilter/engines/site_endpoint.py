"""The site's side of an engine: one letter in, one letter out. No error leaves but as its kind, and none ends the process."""

from __future__ import annotations

import logging

from kilter.errors import Mistake
from kilter.net.frames import apart, together
from kilter.net.site import Site

log = logging.getLogger("kilter.net")


def answered(site: Site, letter: bytes) -> bytes:
    """What this site says to a letter of the server."""
    try:
        head, body = apart(letter, site.largest)
        if head["kind"] == "hello":
            return together(site.hello())
        if head["kind"] != "order":
            raise Mistake("The server says something that is not ours.")
        terms = head.pop("terms", None)
        if not isinstance(terms, dict):
            raise Mistake("The server sends no terms with its order.")
        if terms.get("relay") and site.identity is None:
            raise Mistake("Nobody vouches for this site's key for sealed letters: give tls=FOLDER, with a certificate.")
        site.agree(terms)
        if head.get("run") != site.run:
            raise Mistake("The server's order is of another run than its terms.")
        return together(*site.carry_out(head, body))
    except Mistake as e:
        return refusal(str(e), e)
    except Exception as e:  # whatever it is, the server hears that there is no reply, and nothing else
        return refusal(f"{type(e).__name__}; see that site's log", e)


def refusal(why: str, e: Exception) -> bytes:
    """No reply, and why; the rest stays in this site's log."""
    log.error("%s", e, exc_info=None if isinstance(e, Mistake) else e)
    return together({"kind": "refusal", "why": "".join(c if c.isprintable() else " " for c in why)[:300]})
