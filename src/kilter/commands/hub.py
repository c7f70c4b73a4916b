"""kilter hub and kilter site: many runs between the same sites; and submit, jobs, logs, cancel and fetch for those who submit."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kilter.commands.experiment_options import Json, print_json, stdout
from kilter.commands.network_log import LogFile, LogJson, prepare
from kilter.commands.network_options import Deadline, Grace
from kilter.errors import Mistake

if TYPE_CHECKING:
    from kilter.hub.client import HubClient
    from kilter.hub.messages import JobView

Config = Annotated[Path, typer.Option(help="The configuration, a TOML file.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log only problems.")]
HubAddress = Annotated[str, typer.Option("--hub", envvar="KILTER_HUB", help="HOST:PORT of the hub.")]
Tls = Annotated[Path, typer.Option("--tls", envvar="KILTER_TLS", help="Folder with key.pem, cert.pem, ca.pem.")]
HubName = Annotated[str, typer.Option(help="The name in the hub's certificate.")]
JobNumber = Annotated[int, typer.Argument(help="The number that `kilter submit` printed.", min=1)]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    hub = typer.Typer(help="A hub: a queue of runs between its sites.", no_args_is_help=True)
    hub.command("run")(hub_run)
    hub.command("study", hidden=True)(hub_study)
    app.add_typer(hub, name="hub")
    site = typer.Typer(help="The agent of a site.", no_args_is_help=True)
    site.command("run")(site_run)
    app.add_typer(site, name="site")
    for command in (submit, jobs, logs, cancel, fetch):
        app.command()(command)


def hub_run(
    config: Config = Path("hub.toml"), log_file: LogFile = None, log_json: LogJson = False, quiet: Quiet = False
) -> None:
    """Keep a queue of runs, and lead them. Start it again after a crash: nothing is lost."""
    from kilter.hub.config import read_hub
    from kilter.hub.run_hub import serve_hub

    prepare(quiet, log_file, log_json)
    settings = read_hub(config)
    _run_until_stopped(lambda: serve_hub(settings, lambda line: stdout.print(line, markup=False, soft_wrap=True)))


def hub_study(queue: Path, job: int, spec: Path, out: Path) -> None:
    """Drive a study whose runs go through the queue (started by the hub)."""
    from kilter.hub.network_study import drive

    drive(queue, job, spec, out)


def site_run(
    config: Config = Path("site.toml"), log_file: LogFile = None, log_json: LogJson = False, quiet: Quiet = False
) -> None:
    """Serve the runs of a hub at this site, under its policy. Start it again after a crash: nothing is lost."""
    from kilter.hub.config import read_site
    from kilter.hub.run_hub import run_agent

    prepare(quiet, log_file, log_json)
    settings = read_site(config)
    _run_until_stopped(lambda: run_agent(settings))


def _run_until_stopped(work: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run until Ctrl-C or SIGTERM, then end in an orderly way."""

    async def main() -> None:
        task = asyncio.ensure_future(work())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            stdout.print("Stopped.")

    try:
        asyncio.run(main())
    except BaseExceptionGroup as group:
        mistakes = group.subgroup(Mistake)
        raise (mistakes.exceptions[0] if mistakes else group) from None


# Submitters and observers -----------------------------------------------------------------------------------------------


@contextmanager
def connected(hub: str, tls_: Path, hub_name: str) -> Iterator[HubClient]:
    from kilter.hub.client import HubClient
    from kilter.net.tls import Identity

    client = HubClient(hub, Identity.read(tls_), hub_name)
    try:
        yield client
    finally:
        client.close()


def submit(
    file: Annotated[Path, typer.Argument(help="An experiment or study file.")],
    hub: HubAddress,
    tls_: Tls,
    hub_name: HubName = "server",
    sites: Annotated[str, typer.Option(help="Who takes part, by name; default: all sites of the hub.")] = "",
    quorum: Annotated[int, typer.Option(help="Fewest sites to begin and to go on with; default: all.", min=0)] = 0,
    data: Annotated[str, typer.Option(help="The hub's data (test set, public rows) by name; none: it has none.")] = "",
    name: Annotated[str, typer.Option(help="A name for lists; default: the file's.")] = "",
    deadline: Deadline = 600.0,
    grace: Grace = 30.0,
    preset: Annotated[str, typer.Option(help="One of the study's presets.", show_default=False)] = "",
) -> None:
    """Queue an experiment or a study at a hub; prints the number of the job."""
    from kilter.hub.messages import SubmitRequest
    from kilter.records.toml_file import read_toml

    read_toml(file)
    text = file.read_text()
    named = name or (file.parent.absolute().name if file.stem == "study" else file.stem)
    who = [word.strip() for word in sites.split(",") if word.strip()]
    request = SubmitRequest(text, named[:80], who, quorum, data, deadline, grace, preset)
    with connected(hub, tls_, hub_name) as client:
        job = client.submit(request)
    stdout.print(f"Job {job.job} ({job.kind} '{job.name}') is queued for {', '.join(job.sites)}.", markup=False)
    stdout.print(f"Follow it: kilter logs -f {job.job}", markup=False)


def jobs(
    hub: HubAddress,
    tls_: Tls,
    job: Annotated[
        int | None, typer.Argument(help="Only this job, with the runs of a study.", show_default=False, min=1)
    ] = None,
    hub_name: HubName = "server",
    most: Annotated[int, typer.Option(help="How many to list.", min=1, max=10_000)] = 1000,
    as_json: Json = False,
) -> None:
    """List your jobs at a hub, newest first; observers see everyone's."""
    with connected(hub, tls_, hub_name) as client:
        listed = client.job(job) if job else client.jobs(most)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(listed))
        return
    if not listed:
        stdout.print("There are no jobs.")
        return
    stdout.print(job_table(listed))


def job_table(listed: list[JobView]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("job", "name", "by", "state", "rounds", "sites", "submitted"):
        table.add_column(name, no_wrap=name != "name")
    for job in listed:
        unit = " runs" if job.kind == "study" else ""
        rounds = f"{job.rounds}/{job.of_rounds}{unit}" if job.of_rounds else "-"
        sites = f"{job.quorum or len(job.sites)}/{len(job.sites)}"
        shown = f"  {job.name}" if job.parent else job.name
        state = job.state + (f": {job.reason}" if job.reason else "")
        table.add_row(str(job.job), shown, job.owner, state, rounds, sites, job.submitted[:16].replace("T", " "))
    table.columns[3].no_wrap = False
    return table


def logs(
    job: JobNumber,
    hub: HubAddress,
    tls_: Tls,
    hub_name: HubName = "server",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
) -> None:
    """Print the log of a job. With -f, exit with 1 if the job fails or is cancelled."""
    with connected(hub, tls_, hub_name) as client:
        empty = True
        for part in client.logs(job, follow):
            empty = False
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        if follow or empty:
            view = client.job(job)[0]
            stdout.print(f"Job {job} is {view.state}{f': {view.reason}' if view.reason else ''}.", markup=False)
            if follow and view.state != "finished":
                raise typer.Exit(1)


def cancel(job: JobNumber, hub: HubAddress, tls_: Tls, hub_name: HubName = "server") -> None:
    """Cancel a job of yours, and the runs of a study."""
    with connected(hub, tls_, hub_name) as client:
        client.cancel(job)
    stdout.print(f"Job {job} is cancelled. What it wrote stays: kilter fetch {job}.", markup=False)


def fetch(
    job: JobNumber,
    hub: HubAddress,
    tls_: Tls,
    hub_name: HubName = "server",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default: job-NUMBER.", show_default=False)
    ] = None,
) -> None:
    """Copy the run folder of a job, or a study's folder with its tables, from the hub."""
    folder = out or Path(f"job-{job}")
    with connected(hub, tls_, hub_name) as client:
        count = client.fetch(job, folder)
    if not count:
        raise Mistake(f"Job {job} has no files yet.")
    stdout.print(f"{count} files in {folder}", markup=False)
