"""What workers of a pool do: a process that begins with it imports the client and nothing of the server."""

from __future__ import annotations

from tangram import Client


def square(client: Client, number: int) -> int:
    """Return what the gateway answers, through a client that came with the job."""
    return int(client.invoke("shell", {"n": number * number}).result["n"])


def fail(client: Client) -> None:
    client.invoke("shell", {"fail": True}).raise_for_failure()


def miss(client: Client) -> None:
    client.invoke("nobody", {})
