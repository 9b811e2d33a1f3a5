"""TLS of the channel: a certificate that signs itself, and a node that knows it by its fingerprint."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from manager.errors import InvalidConfig

COMPONENT = "node.tls"
#: Days for which a certificate is good; nobody looks at that but tools for people, for it is known by its fingerprint.
DAYS = 36500
#: Seconds that openssl may take.
MAKE_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeCertificate:
    """What a gateway shows its nodes."""

    cert: Path
    key: Path
    #: SHA-256 of the certificate, hexadecimal.
    fingerprint: str


def ensure_certificate(directory: Path) -> NodeCertificate:
    """Return the certificate of a directory, made at the first call; raises InvalidConfig without openssl."""
    cert, key = directory / "channel.crt", directory / "channel.key"
    if not (cert.exists() and key.exists()):
        part = directory / "channel.part"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", str(DAYS), "-subj", "/CN=tangram", "-keyout", str(key), "-out", str(part)]
        try:
            key.touch(0o600)
            subprocess.run(command, check=True, capture_output=True, timeout=MAKE_S, stdin=subprocess.DEVNULL)
            key.chmod(0o600)
            part.replace(cert)
        except FileNotFoundError:
            message = "openssl is not installed: install it, or give cluster a certificate of your own"
            raise InvalidConfig(message, component=COMPONENT) from None
        except (OSError, subprocess.SubprocessError) as error:
            raise InvalidConfig(f"no certificate could be made in {directory}: {error}", component=COMPONENT) from None
    return NodeCertificate(cert, key, fingerprint_of(cert))


def fingerprint_of(cert: Path) -> str:
    """Return the SHA-256 of a PEM certificate; raises InvalidConfig."""
    try:
        return _digest(ssl.PEM_cert_to_DER_cert(cert.read_text(encoding="ascii")))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{cert} is no certificate: {error}", component=COMPONENT) from None


def server_side(certificate: NodeCertificate) -> ssl.SSLContext:
    """Return the context of the gateway; raises InvalidConfig."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a node that dials again begins anew
    try:
        context.load_cert_chain(certificate.cert, certificate.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"{certificate.cert} cannot be used: {error}", component=COMPONENT) from None
    return context


def node_side() -> ssl.SSLContext:
    """Return the context of a node, which looks at the fingerprint (`shows`) and at nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def shows(peer: ssl.SSLObject | ssl.SSLSocket, fingerprint: str) -> bool:
    """Return whether the other side of a connection has the certificate of this fingerprint."""
    shown = peer.getpeercert(binary_form=True)
    return shown is not None and _digest(shown) == fingerprint.replace(":", "").lower()


def _digest(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()
