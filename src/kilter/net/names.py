"""Names of sites and texts from elsewhere: what may stand in files, logs and records. Imports nothing heavy: a hub uses it, too."""

from __future__ import annotations

import re

from kilter.errors import Malformed

RESERVED = ("server", "~took", "~began")  # names that the runtime uses for itself; the first is `kilter.core.SERVER`
NAME = re.compile(r"[^\W_][\w.-]{0,63}", re.ASCII)
HEX = re.compile(r"[0-9a-f]{8,64}")


def check_name(name: str) -> str:
    """A name that may stand in files, logs and records; `Malformed` otherwise."""
    if not NAME.fullmatch(name) or name in RESERVED:
        raise Malformed(
            f"'{printable(name, 64)}' cannot be a site's name: use letters, digits, '-', '_' and '.', and not '{RESERVED[0]}'"
        )
    return name


def printable(text: str, longest: int = 300) -> str:
    """Text from elsewhere, safe for a log line: no control characters, and not too long."""
    return "".join(c if c.isprintable() else "?" for c in text[:longest])
