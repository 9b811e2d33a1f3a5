"""``tangram token``: what a program that is not ours sends."""

from __future__ import annotations

import json

import click
import httpx

from tangram import UnauthorizedError
from tangram.cli.global_options import inherit
from tangram.cli.options import json_option
from tangram.client.address import DEFAULT, SERVER, server_of
from tangram.client.credentials import find_token_of, why_without
from tangram.types.local_tokens import ADMIN, INVOKE


@click.command()
@click.option("--admin", is_flag=True, help="The one that may also change the gateway for everybody.")
@click.option("--server", callback=inherit, help=f"The gateway [{SERVER}, or {DEFAULT}].")
@json_option
def token(admin: bool, server: str | None, as_json: bool) -> None:
    """Print a token of the gateway that you serve on this machine: curl -H "Authorization: Bearer $(tangram token)"."""
    address = server_of(server)
    found = find_token_of(httpx.URL(address), (ADMIN,) if admin else (INVOKE,))
    if found is None:
        if why := why_without(httpx.URL(address)):
            raise UnauthorizedError(why, component="client")
        raise UnauthorizedError(
            f"no gateway of this user serves at {address} on this machine, or its token is one that was configured: "
            "ask whoever started it, and set TANGRAM_TOKEN",
            component="client",
        )
    click.echo(json.dumps({"token": found}) if as_json else found)
