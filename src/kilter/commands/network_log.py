"""The log of a server, site or peer: lines with time zone and level, or JSON; on stderr, or in a file that is rotated."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from kilter.errors import Mistake

LogFile = Annotated[
    Path | None, typer.Option(help="Log to this file instead of stderr; it is rotated at 10 MB.", show_default=False)
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]
LARGEST_FILE, KEPT_FILES = 10_000_000, 5


class PlainFormatter(logging.Formatter):
    """Log lines in which nothing that came over the network can start a new line."""

    def __init__(self, as_json: bool = False) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        text = "".join(c if c.isprintable() else "?" for c in record.getMessage())
        moment = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self.as_json:
            values = {"time": moment, "level": record.levelname.lower(), "message": text}
            return json.dumps(values | ({"traceback": trace} if trace else {}))
        return f"{moment} {record.levelname.lower()}: {text}" + (f"\n{trace}" if trace else "")


def prepare(quiet: bool, file: Path | None = None, as_json: bool = False) -> None:
    """Start the log, and traces if the environment asks for them; new files are private."""
    from kilter.net.tracing import configure

    configure()
    os.umask(0o077)
    logger = logging.getLogger("kilter.net")
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.handlers.RotatingFileHandler(file, maxBytes=LARGEST_FILE, backupCount=KEPT_FILES)
        except OSError as e:
            raise Mistake(f"'{file}' cannot be written: {e.strerror}.") from None
    handler.setFormatter(PlainFormatter(as_json))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
