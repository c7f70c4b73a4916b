"""The site's side of an engine: one letter in, one letter out. Errors leave only as their kind, and none ends the process."""

from __future__ import annotations

import logging

from kilter.errors import Mistake
from kilter.net.frames import pack_letter, to_frames, unpack_letter
from kilter.net.messages import Order, Refusal, kind_of
from kilter.net.site import Site
from kilter.net.terms import Terms

log = logging.getLogger("kilter.net")


def answer_letter(site: Site, letter: bytes) -> bytes:
    """What this site answers to a letter of the server."""
    try:
        head, body = unpack_letter(letter, site.largest)
        if kind_of(head) == "hello":
            hello = site.hello().head()
            site.audit.record("hello", next(to_frames(hello)), kinds="data description, row count", to=site.server_name)
            return pack_letter(hello)
        order = Order.parse(head)
        plain = head.get("terms")
        if not isinstance(plain, dict):
            raise Mistake("The server sends no terms with its order.")
        terms = Terms.parse(plain)
        if terms.sealed and site.identity is None:
            raise Mistake("Nobody vouches for this site's key for sealed letters: give tls=FOLDER, with a certificate.")
        site.agree(terms)
        if order.run != terms.run:
            raise Mistake("The server's order belongs to another run than its terms.")
        reply, result = site.carry_out(order, body)
        return pack_letter(reply.head(), result)
    except Mistake as e:
        return refuse(str(e), e)
    except Exception as e:  # whatever it is, the server learns that there is no reply, and nothing else
        return refuse(f"{type(e).__name__}; see that site's log", e)


def refuse(why: str, e: Exception) -> bytes:
    """No reply, and why; the details stay in this site's log."""
    log.error("%s", e, exc_info=None if isinstance(e, Mistake) else e)
    return pack_letter(Refusal(why).head())
