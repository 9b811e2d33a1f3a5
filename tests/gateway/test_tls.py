"""TLS of both servers, with a certificate authority of the test's own."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpclib.client import Channel
from grpclib.exceptions import GRPCError

from gateway.config.load import load
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from manager.errors import InvalidConfig
from tangram import AsyncClient, ConnectionFailed, InvalidConfigError, Retries
from tangram.client.requests import trust_of
from tests.gateway.conftest import GatewayBench, RunningGateway, serving, until

#: What signs a certificate whose time is over.
AUTHORITY = """[ca]
default_ca = own
[own]
database = {directory}/index.txt
serial = {directory}/serial
new_certs_dir = {directory}
default_md = sha256
policy = any
[any]
commonName = supplied
"""
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments: str | Path) -> str:
    return subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority (ca.pem), and what it has signed: a server's and a client's certificate."""
    made: Path = tmp_path_factory.mktemp("pki")
    openssl("req", "-x509", *EC, "-keyout", made / "ca.key", "-out", made / "ca.pem", "-subj", "/CN=ca", "-days", "2")
    for name in ("server", "client"):
        key, asked, cert = (made / f"{name}.{part}" for part in ("key", "csr", "pem"))
        names = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        openssl("req", *EC, "-keyout", key, "-out", asked, "-subj", f"/CN={name}", *names)
        authority = ("-CA", made / "ca.pem", "-CAkey", made / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", asked, *authority, "-copy_extensions", "copyall", "-days", "2", "-out", cert)
    (made / "both.pem").write_bytes((made / "client.key").read_bytes() + (made / "client.pem").read_bytes())
    return made


@pytest.fixture(params=["any", "known"])
async def served(request: pytest.FixtureRequest, pki: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway that speaks TLS, with any client or with those whose certificate it knows."""
    tls = {"cert": pki / "server.pem", "key": pki / "server.key"}
    known = {"client_ca": pki / "ca.pem"} if request.param == "known" else {}
    async with serving(GatewayBench(tmp_path, server={"auth": "token", "tls": tls | known})) as running:
        yield running


def knows_clients(gateway: RunningGateway) -> bool:
    tls = gateway.app.config.server.tls
    return tls is not None and tls.client_ca is not None


async def test_the_client_trusts_the_authority_that_it_is_told(served: RunningGateway, pki: Path) -> None:
    address = f"https://localhost:{served.app.http_port}"
    assert served.app.page_address().startswith("https://127.0.0.1:")
    cert = str(pki / "both.pem") if knows_clients(served) else None
    async with AsyncClient(address, ca=str(pki / "ca.pem"), cert=cert) as client:  # the token is found as ever
        assert (await client.invoke("echo", {"a": 1})).result == {"a": 1}
    with pytest.raises(ConnectionFailed, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
        async with AsyncClient(address, cert=cert) as client:
            await client.functions()


async def test_the_environment_names_the_authority(
    served: RunningGateway, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CA", str(pki / "ca.pem"))
    monkeypatch.setenv("TANGRAM_CERT", str(pki / "both.pem"))
    async with AsyncClient(f"https://127.0.0.1:{served.app.http_port}") as client:
        assert (await client.invoke("echo", {})).ok
    monkeypatch.setenv("TANGRAM_CA", str(pki / "nowhere.pem"))
    with pytest.raises(InvalidConfigError, match=r"TANGRAM_CA names .*nowhere\.pem, and there is no such file"):
        async with AsyncClient(f"https://127.0.0.1:{served.app.http_port}") as client:
            await client.functions()
    with pytest.raises(InvalidConfigError, match=r"^ca names .*ca\.key, which does not hold certificates in PEM"):
        trust_of(True, str(pki / "ca.key"), None)
    with pytest.raises(InvalidConfigError, match=r"^cert names .*ca\.pem, which does not hold a certificate followed"):
        trust_of(True, str(pki / "ca.pem"), str(pki / "ca.pem"))


async def test_files_that_are_renewed_are_served_without_a_restart(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.tls.LOOK_S", 0.02)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes((pki / "server.pem").read_bytes())
    key.write_bytes((pki / "server.key").read_bytes())

    def shown(port: int) -> bytes:
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=20))

    async def serves(name: str, *ports: int) -> None:
        wanted = ssl.PEM_cert_to_DER_cert((pki / name).read_text())
        async with asyncio.timeout(20):
            for port in ports:
                while await asyncio.to_thread(shown, port) != wanted:
                    pass

    said: list[str] = []

    def told() -> str:
        said.append(capsys.readouterr().out)
        return "".join(said)

    server = {"auth": "token", "tls": {"cert": cert, "key": key}}
    async with serving(GatewayBench(tmp_path / "gateway", server=server)) as running:
        ports = (running.app.http_port, running.app.grpc_port)
        await serves("server.pem", *ports)
        cert.write_bytes((pki / "client.pem").read_bytes())  # half of a renewal: the key is still the old one's
        await until(lambda: told().count("renewed files are not taken") >= 2)
        await serves("server.pem", *ports)
        key.write_bytes((pki / "client.key").read_bytes())
        await serves("client.pem", *ports)
        await until(lambda: told().count("a renewed certificate is served") >= 2)
    assert told().count("a renewed certificate is served") == 2, "once for each door"


@pytest.mark.promise("HTTP and gRPC speak TLS, and accept only callers with a certificate where that is configured.")
async def test_who_brings_no_certificate_comes_in_only_where_none_is_asked_for(
    served: RunningGateway, pki: Path
) -> None:
    port, ca = served.app.http_port, str(pki / "ca.pem")
    async with asyncio.timeout(Retries().outage_s / 2):  # who was never answered is not patient
        async with AsyncClient(f"https://127.0.0.1:{port}", ca=ca) as client:
            if knows_clients(served):
                with pytest.raises(ConnectionFailed, match="hangs up without a certificate of yours: TANGRAM_CERT"):
                    await client.functions()
            else:
                assert await client.functions()
        async with AsyncClient(f"http://127.0.0.1:{port}", token="t") as client:
            with pytest.raises(ConnectionFailed, match="a gateway with TLS is named by https://"):
                await client.functions()


async def test_grpc_speaks_it_with_the_same_tokens(served: RunningGateway, pki: Path) -> None:
    trust = ssl.create_default_context(cafile=pki / "ca.pem")
    trust.set_alpn_protocols(["h2"])
    trust.load_cert_chain(pki / "both.pem")
    channel = Channel("127.0.0.1", served.app.grpc_port, ssl=trust)
    request = pb.InvokeRequest(function="echo", input_json=b"{}")
    assert served.app.tokens is not None
    try:
        stub = GatewayStub(channel)
        with pytest.raises(GRPCError, match="unauthorized"):
            await stub.Invoke(request)
        for token in (served.app.tokens.invoke, served.app.tokens.admin):
            metadata = {"authorization": f"Bearer {token}"}
            assert (await stub.Invoke(request, metadata=metadata)).state == "succeeded"
    finally:
        channel.close()


def test_certificates_that_cannot_be_used_are_told_at_validate(pki: Path, tmp_path: Path) -> None:
    config = tmp_path / "tangram.yaml"
    for tls in (
        f"{{cert: {pki}/server.pem, key: {pki}/client.key}}",
        f"{{cert: {pki}/none.pem, key: {pki}/server.key}}",
        f"{{cert: {pki}/server.pem, key: {pki}/server.key, client_ca: {pki}/ca.key}}",
    ):
        config.write_text(f"server: {{host: 0.0.0.0, tls: {tls}}}")
        with pytest.raises(InvalidConfig, match="cannot be used"):
            load([config], {})
    config.write_text(f"server: {{host: 0.0.0.0, tls: {{cert: {pki}/server.pem, key: {pki}/server.key}}}}")
    assert load([config], {}).server.tls is not None


def test_a_certificate_that_has_expired_is_told_at_validate(pki: Path, tmp_path: Path) -> None:
    config, old = tmp_path / "tangram.yaml", tmp_path / "old.pem"
    (tmp_path / "index.txt").touch()
    (tmp_path / "serial").write_text("01")
    (tmp_path / "ca.cnf").write_text(AUTHORITY.format(directory=tmp_path))
    times = ("-startdate", "20200101000000Z", "-enddate", "20200201000000Z")
    asked = ("-in", pki / "server.csr", "-out", old, "-cert", pki / "ca.pem", "-keyfile", pki / "ca.key")
    openssl("ca", "-batch", "-config", tmp_path / "ca.cnf", *asked, *times)
    config.write_text(f"server: {{host: 0.0.0.0, tls: {{cert: {old}, key: {pki}/server.key}}}}")
    with pytest.raises(InvalidConfig, match=r"every client refuses .*old.pem: certificate has expired; renew it"):
        load([config], {})


async def test_who_speaks_no_tls_is_cut_and_holds_up_nobody(served: RunningGateway, pki: Path) -> None:
    silent = await asyncio.open_connection("127.0.0.1", served.app.http_port)
    with pytest.raises(ConnectionFailed, match="https://"):
        address = f"http://127.0.0.1:{served.app.http_port}"
        async with AsyncClient(address, retries=Retries(outage_s=0)) as client:
            await client.functions()
    cert = str(pki / "both.pem") if knows_clients(served) else None
    async with AsyncClient(f"https://localhost:{served.app.http_port}", ca=str(pki / "ca.pem"), cert=cert) as client:
        assert (await client.invoke("echo", {"a": 1})).result == {"a": 1}
    silent[1].close()
    assert served.app.connections["http"].open <= 1
