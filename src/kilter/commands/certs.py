"""kilter certs and kilter doctor: keys, certificates, and checks before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilter.commands.experiment_options import Json, print_json, stdout

Folder = Annotated[Path, typer.Option("--out", help="The folder to write to.")]
Days = Annotated[int, typer.Option(help="How long it is valid.", min=1, max=36_500)]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    certs = typer.Typer(help="Keys and certificates.", no_args_is_help=True)
    for name, command in (
        ("new", new),
        ("request", request),
        ("authority", authority),
        ("sign", sign),
        ("install", install),
        ("revoke", revoke),
    ):
        certs.command(name)(command)
    app.add_typer(certs, name="certs")
    app.command()(doctor)


def new(
    folder: Annotated[Path, typer.Option("--out", help="Folder for the authority and one folder for each name.")],
    names: Annotated[
        str, typer.Option(help="Who gets a certificate: server,hospital-a,...; with a role: alice:submitter.")
    ],
    days: Days = 365,
) -> None:
    """Make an authority, keys and certificates for a trial, all in one place."""
    from kilter.net import tls

    for identity in tls.new(folder, tls.words(names), days):
        typer.echo(f"{identity}: key.pem, cert.pem, ca.pem")
    typer.echo(f"{folder / 'ca.key.pem'} makes more of them: keep it away from every site.")


def request(
    name: Annotated[str, typer.Argument(help="The name of this site, as it will stand in its certificate.")],
    folder: Folder,
) -> None:
    """At a site: make a key, which stays here, and a request for a certificate."""
    from kilter.net import enrolment

    mark = enrolment.request(name, folder)
    typer.echo(f"Send {folder / 'request.pem'} to the authority. The key in {folder / 'key.pem'} stays here.")
    typer.echo(f"Read this fingerprint to the authority, by telephone for example: {mark}")


def authority(
    folder: Folder,
    name: Annotated[str, typer.Option(help="Its name.")] = "kilter-authority",
    parent: Annotated[Path | None, typer.Option(help="The authority that signs it. Default: it is a root.")] = None,
    days: Days = 3650,
) -> None:
    """Make an authority: a root, or one below another."""
    from kilter.net import enrolment

    enrolment.authority(folder, name, parent, days)
    typer.echo(f"{folder / 'ca.key.pem'} signs certificates: keep it safe. Everybody trusts {folder / 'ca.pem'}.")


def sign(
    file: Annotated[Path, typer.Argument(help="A site's request.pem.")],
    at: Annotated[Path, typer.Option("--authority", help="The authority's folder.")],
    name: Annotated[str, typer.Option(help="The name that you expect in the request.")],
    folder: Folder,
    role: Annotated[str, typer.Option(help="server, site, submitter or observer.")] = "site",
    days: Days = 365,
) -> None:
    """At the authority: sign a request. Compare the fingerprint with the site's first."""
    from kilter.net import enrolment

    mark = enrolment.sign(file, at, name, role, days, folder)  # type: ignore[arg-type]
    typer.echo(f"Fingerprint of the request: {mark}. Does {name} read the same? If not, delete {folder}.")
    typer.echo(f"Send {folder / 'cert.pem'} and {folder / 'ca.pem'} to {name}.")


def install(
    signed: Annotated[Path, typer.Argument(help="The folder with cert.pem and ca.pem from the authority.")],
    folder: Annotated[Path, typer.Option("--to", help="The folder with this site's key.")],
) -> None:
    """At a site: put a signed certificate next to its key, if it fits. Also to renew one."""
    from kilter.net import enrolment

    expires = enrolment.install(signed, folder)
    typer.echo(f"{folder}: key.pem, cert.pem, ca.pem; valid until {expires:%Y-%m-%d}. Use it with --tls {folder}.")


def revoke(
    certificate: Annotated[Path, typer.Argument(help="The cert.pem to withdraw.")],
    at: Annotated[Path, typer.Option("--authority", help="The authority's folder.")],
) -> None:
    """At the authority: withdraw a certificate. Give the list to `kilter serve --revoked`."""
    from kilter.net.revocation import revoke as withdraw

    typer.echo(f"{withdraw(certificate, at)}: copy it to where the server's --revoked reads it.")


def doctor(
    tls_: Annotated[Path | None, typer.Option("--tls", help="A folder with key.pem, cert.pem and ca.pem.")] = None,
    server: Annotated[str, typer.Option(help="HOST:PORT of the server to reach.", show_default=False)] = "",
    server_name: Annotated[str, typer.Option(help="The name in the server's certificate.")] = "server",
    state_dir: Annotated[Path, typer.Option(help="Where this site keeps its state.")] = Path("kilter-state"),
    policy: Annotated[Path | None, typer.Option(help="This site's policy, site.toml.", show_default=False)] = None,
    data: Annotated[str, typer.Option(help="This site's data, to try reading it.", show_default=False)] = "",
    config: Annotated[
        Path | None, typer.Option(help="Check what an agent's site.toml names, instead.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Check versions, clock, keys, certificate, server, disk, policy and data, and say what to fix."""
    from dataclasses import asdict

    from kilter.net.doctor import examine

    if config is not None:
        from kilter.hub.config import read_site

        settings = read_site(config)
        tls_, server, server_name, data = settings.tls, settings.hub, settings.hub_name, settings.data
        state_dir, policy = settings.state, settings.policy
    role, device = ("site", settings.device) if config is not None else ("", "cpu")
    findings = []
    for finding in examine(tls_, server, server_name, state_dir, policy, data, role, device):
        findings.append(finding)
        if not as_json:
            mark = "ok  " if finding.ok else "fix "
            stdout.print(f"{mark} {finding.check}: {finding.text}", markup=False, soft_wrap=True)
            if finding.fix:
                stdout.print(f"     -> {finding.fix}", markup=False, soft_wrap=True)
    if as_json:
        print_json([asdict(finding) | {"ok": finding.ok} for finding in findings])
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)
