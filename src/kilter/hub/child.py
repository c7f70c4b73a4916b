"""The entry point of the processes of hubs and agents: `kilter WORDS` in a process that ends with its parent.

The exit code says more than that of `kilter`: 10 if the site's policy refuses the run, 11 if its terms are not approved yet.
"""

from __future__ import annotations

import os
import sys
import threading

from kilter.errors import Mistake
from kilter.hub.processes import MISTAKE, NOT_APPROVED, REFUSED


def end_with_parent() -> None:
    """End as soon as standard input does: the parent holds its other end. Everything on disk is whole at any time."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="kilter-parent", daemon=True).start()


def exit_code(error: Mistake) -> int:
    from kilter.net.approvals import NotApproved
    from kilter.net.policy import PolicyViolation

    if isinstance(error, NotApproved):
        return NOT_APPROVED
    return REFUSED if isinstance(error, PolicyViolation) else MISTAKE


def main() -> None:
    end_with_parent()
    from kilter.cli import app

    try:
        app(args=sys.argv[1:])
    except Mistake as e:
        print(f"kilter: {e}", file=sys.stderr)
        sys.exit(exit_code(e))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
