"""The command line.

The modules in `commands` are light: they import torch and the rest of Kilter only when a command runs, so `kilter --help` is fast.
"""

from __future__ import annotations

import errno
import os
import sys

import typer

from kilter.commands import hub, inspect, listing, network, report, run, show, study, use
from kilter.commands.experiment_options import stderr
from kilter.errors import Mistake

NETWORK_LIBRARIES = ("grpc", "cryptography", "prometheus_client")  # an extra: a command that needs them says so
app = typer.Typer(
    name="kilter",
    help="Federated learning for data that is off kilter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for group in (run, use, study, inspect, show, report, listing, network, hub):
    group.register(app)


def out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch could not allocate memory. torch is not imported here, so its errors are known by their text.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    text = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text


def printable(text: str) -> str:
    """A message without characters of a user's data that would move the cursor.

    >>> printable("'a\\x1b[2J' in 'd.csv'")
    "'a?[2J' in 'd.csv'"
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def main() -> None:
    """Entry point. A user's mistake is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except Mistake as e:
        stderr.print(printable(f"kilter: {e}"), markup=False, soft_wrap=True)
        sys.exit(2)
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] not in NETWORK_LIBRARIES:
            raise
        stderr.print(f"kilter: The network needs the library {e.name}: `pip install 'kilter[net]'`.", markup=False)
        sys.exit(2)
    except (MemoryError, RuntimeError) as e:
        if not out_of_memory(e):
            raise
        advice = "use a smaller model or batch, fewer workers, or a machine with more memory"
        stderr.print(f"kilter: There is not enough memory: {advice}.", markup=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:  # `kilter methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as e:  # a file or folder of the user's that no command checks itself
        if not e.filename:
            raise
        advice = "free some space" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "check the path and its permissions"
        stderr.print(f"kilter: '{e.filename}': {e.strerror}: {advice}.", markup=False, soft_wrap=True)
        sys.exit(2)
