"""Where the gateway is: the address and the token that a client uses, from its arguments or the environment."""

from __future__ import annotations

import os
import re
import ssl
from urllib.parse import SplitResult, urlsplit

import httpx

from tangram.errors import InvalidConfigError

#: The gateway's own default address.
DEFAULT = "http://127.0.0.1:8080"
SERVER, TOKEN = "TANGRAM_SERVER", "TANGRAM_TOKEN"
CA, CERT = "TANGRAM_CA", "TANGRAM_CERT"
_REMEDY = "write http://HOST:PORT, https://HOST:PORT or HOST:PORT"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]")


def server_of(given: str | None) -> str:
    """Return the base URL of the gateway: ``given``, or TANGRAM_SERVER, or `DEFAULT`.

    An address without a scheme is one of http. Raises InvalidConfigError, naming where the address came from.
    """
    if given is not None:
        return _checked(given, "server")
    return _checked(os.environ.get(SERVER) or DEFAULT, SERVER)


def token_of(given: str | None) -> str | None:
    """Return the bearer token: ``given`` (an empty one is none), or TANGRAM_TOKEN; None where neither is there.

    Raises InvalidConfigError.
    """
    token = (os.environ.get(TOKEN) or None) if given is None else given
    if token is not None and not (token.isascii() and token.isprintable()):
        where = TOKEN if given is None else "token"
        raise InvalidConfigError(f"{where}: a token is printable ASCII, without line breaks (a trailing newline?)")
    return token


def trust_of(https: bool, ca: str | None, cert: str | None) -> ssl.SSLContext:
    """Return whom connections trust; raises InvalidConfigError for files that cannot be used.

    ``ca`` (or TANGRAM_CA) is a file of certificates in place of the system's, ``cert`` (or TANGRAM_CERT) one of the
    caller's own with its key, both in PEM. http needs none, and reading them takes a while.
    """
    if not https:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    where = (CA if ca is None else "ca", CERT if cert is None else "cert")
    ca, cert = ca or os.environ.get(CA) or None, cert or os.environ.get(CERT) or None
    try:
        context = httpx.create_ssl_context() if ca is None else ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise _unusable(where[0], ca, "certificates", error) from None
    try:
        if cert is not None:
            context.load_cert_chain(cert)
    except OSError as error:
        raise _unusable(where[1], cert, "a certificate followed by its key, or the key by it,", error) from None
    return context


def _unusable(where: str, file: str | None, wanted: str, error: OSError) -> InvalidConfigError:
    """Return the exception of a file that cannot be used (an SSLError is an OSError, too)."""
    if isinstance(error, ssl.SSLError):
        return InvalidConfigError(f"{where} names {file}, which does not hold {wanted} in PEM: {error}")
    if isinstance(error, FileNotFoundError):
        return InvalidConfigError(f"{where} names {file}, and there is no such file")
    return InvalidConfigError(f"{where} names {file}, which cannot be read: {error.strerror or error}")


def _checked(address: str, where: str) -> str:
    def wrong(why: str) -> InvalidConfigError:
        return InvalidConfigError(f"{where}: {address!r} {why}; {_REMEDY}")

    if not address or re.search(r"\s", address):
        raise wrong("is empty" if not address else "has white space in it")
    if address.count(":") > 1 and "/" not in address and "[" not in address:
        raise wrong("is no address (IPv6 is written in [])")
    scheme = _SCHEME.match(address)
    if scheme is not None and scheme[1].lower() not in ("http", "https"):
        raise wrong(f"begins with {scheme[1]}:, and the gateway speaks http and https only")
    try:
        url = urlsplit(address if scheme is not None else f"http://{address}")
        port = url.port
    except ValueError as error:
        raise wrong(f"is no address ({error})") from None
    odd = _odd_part(url)
    if odd is not None:
        raise wrong(odd)
    host = url.netloc.rpartition(":")[0] if port is not None else url.netloc.removesuffix(":")
    if _HOST.fullmatch(host) is None:
        raise wrong("names no host")
    return f"{url.scheme.lower()}://{host}" + ("" if port is None else f":{port}")


def _odd_part(url: SplitResult) -> str | None:
    """What this has that no address of a gateway has."""
    if "@" in url.netloc:
        return "has a user name in it; the bearer token goes into token or TANGRAM_TOKEN"
    if url.path not in ("", "/"):
        return f"has the path {url.path!r}, and the gateway answers at the root of its host only"
    return "has a query or a fragment" if url.query or url.fragment else None
