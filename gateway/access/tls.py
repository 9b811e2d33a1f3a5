"""TLS of the doors: the context that both servers speak with."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from gateway.config.sections import TlsSection
from manager.errors import InvalidConfig

#: Seconds in which a peer must have shaken hands.
HANDSHAKE_S = 20.0


def server_context(tls: TlsSection, protocols: Sequence[str]) -> ssl.SSLContext:
    """Return the context of a server that offers these protocols (ALPN); raises InvalidConfig for odd files."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(protocols)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"server.tls: {tls.cert} and {tls.key} cannot be used: {error}", component="tls") from None
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(
                f"server.tls.client_ca: {tls.client_ca} cannot be used: {error}", component="tls"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
