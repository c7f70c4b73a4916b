"""Commands with which a site decides what may leave it, and checks what has left: approve, audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilter.errors import Mistake

StateDir = Annotated[Path, typer.Option(help="The site's state directory (as in kilter join).")]


def approve(
    digest: Annotated[str, typer.Argument(help="The digest that `kilter join --dry-run` prints.")] = "",
    state_dir: StateDir = Path("kilter-state"),
) -> None:
    """Approve the terms of a run at this site, by digest. Without a digest, list what is approved and what waits."""
    from kilter.net.approvals import PENDING, Approvals
    from kilter.net.audit import AuditLog

    approvals = Approvals(state_dir)
    if digest:
        if digest not in approvals.pending():
            typer.echo(f"No terms with this digest wait in '{state_dir}'; the approval is for later.")
        approvals.add(digest, "kilter approve")
        log = AuditLog(state_dir)
        log.record("approval", approval=digest)
        log.close()
    if not approvals.entries() and not approvals.pending():
        typer.echo(f"Nothing is approved, and nothing waits for an approval, in '{state_dir}'.")
    for entry in approvals.entries():
        typer.echo(f"{entry['digest']}  {entry['time']}  {entry['how']}")
    for waiting in approvals.pending():
        typer.echo(f"{waiting}  waits for an approval: read {state_dir / PENDING / waiting}.txt first")


def audit(
    state_dir: StateDir = Path("kilter-state"),
    export: Annotated[Path | None, typer.Option(help="Write all entries to this CSV file.")] = None,
) -> None:
    """Verify the audit log of this site, or of every run of its agent; summarise what has left it, and export it."""
    from kilter.net import audit as audit_log

    runs = sorted(state_dir.glob(f"runs/*/{audit_log.FILE}"), key=lambda path: (len(path.parts[-2]), path.parts[-2]))
    paths = [path for path in (state_dir / audit_log.FILE, *runs) if path.exists()]  # an agent has one for each run
    if not paths:
        raise Mistake(
            f"There is no audit log in '{state_dir}': give the --state-dir of `kilter join`, or an agent's state."
        )
    if export is not None and len(paths) > 1:
        raise Mistake(f"'{state_dir}' has several audit logs: give one, such as --state-dir {paths[-1].parent}.")
    for path in paths:
        if len(paths) > 1:
            typer.echo(f"{path}:")
        for line in audit_log.summarise(path):
            typer.echo(line)
    if export is not None:
        typer.echo(f"{audit_log.export(paths[0], export)} entries written to {export}")
