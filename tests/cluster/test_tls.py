"""Certificates of servers: asked for, shown, replaced while the server runs, and never left half replaced."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cluster.certificates import Authority, Pair
from tests.services.router.router_under_test import serving
from whalepod.cluster.config import ClusterConfig, RouterSettings, TlsSettings
from whalepod.cluster.grpc_options import channel_options, server_options
from whalepod.cluster.router_channel import open_router_channel
from whalepod.cluster.tls import ServerTls
from whalepod.core.errors import ConfigError

APP = Starlette(routes=[Route("/", lambda _: PlainTextResponse("here"))])


@pytest.fixture
def server_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "server-ca")


@pytest.fixture
def client_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "client-ca")


def client_context(authority: Authority, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.pem))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


async def asked(port: int, context: ssl.SSLContext) -> str | None:
    """The answer; None: the handshake failed."""
    try:
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            return (await client.get(f"https://127.0.0.1:{port}/")).text
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return None


@asynccontextmanager
async def grpc_server(tls: ServerTls) -> AsyncGenerator[int]:
    server = grpc.aio.server(options=server_options())
    port = server.add_secure_port("127.0.0.1:0", tls.grpc_credentials())
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def connects(port: int, authority: Authority, own: Pair | None = None) -> bool:
    """Whether a gRPC client comes as far as hearing that there is no such method."""
    chain, key = (None, None) if own is None else (own.cert.read_bytes(), own.key.read_bytes())
    credentials = grpc.ssl_channel_credentials(authority.pem.read_bytes(), key, chain)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=channel_options()) as channel:
        try:
            await channel.unary_unary("/none/None")(b"", timeout=2)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    raise AssertionError("nobody serves this method")


async def test_http_shows_its_certificate_and_a_new_one_when_there_is_one(
    tmp_path: Path, server_authority: Authority
) -> None:
    first = server_authority.issue("server")
    tls = ServerTls(cert_file=first.cert, key_file=first.key)
    async with serving(APP, tls=tls) as port:
        assert await asked(port, client_context(server_authority)) == "here"
        other = Authority(tmp_path, "other-ca")
        assert await asked(port, client_context(other)) is None
        new = other.issue("new")
        shutil.copy(new.cert, first.cert)
        assert await asked(port, client_context(server_authority)) == "here", "half of a pair changes nothing"
        shutil.copy(new.key, first.key)
        assert await asked(port, client_context(other)) == "here"
        assert await asked(port, client_context(server_authority)) is None


async def test_http_asks_clients_for_a_certificate_of_the_authorities_of_today(
    tmp_path: Path, server_authority: Authority, client_authority: Authority
) -> None:
    own, mine = server_authority.issue("server"), client_authority.issue("client")
    tls = ServerTls(cert_file=own.cert, key_file=own.key, client_ca_file=client_authority.pem)
    async with serving(APP, tls=tls) as port:
        assert await asked(port, client_context(server_authority, mine)) == "here"
        assert await asked(port, client_context(server_authority)) is None
        assert await asked(port, client_context(server_authority, server_authority.issue("stranger"))) is None
        later = Authority(tmp_path, "later-ca")
        shutil.copy(later.pem, client_authority.pem)
        assert await asked(port, client_context(server_authority, mine)) is None
        assert await asked(port, client_context(server_authority, later.issue("late"))) == "here"


async def test_grpc_does_the_same(tmp_path: Path, server_authority: Authority, client_authority: Authority) -> None:
    own, mine = server_authority.issue("server"), client_authority.issue("client")
    tls = ServerTls(cert_file=own.cert, key_file=own.key, client_ca_file=client_authority.pem)
    async with grpc_server(tls) as port:
        assert await connects(port, server_authority, mine)
        assert not await connects(port, server_authority)
        other = Authority(tmp_path, "other-ca")
        new = other.issue("new")
        shutil.copy(new.cert, own.cert)
        shutil.copy(new.key, own.key)
        assert await connects(port, other, mine)
        assert not await connects(port, server_authority, mine)


def test_files_that_cannot_be_used_are_named_at_start(
    tmp_path: Path, server_authority: Authority, client_authority: Authority
) -> None:
    one, two = server_authority.issue("one"), server_authority.issue("two")
    with pytest.raises(ConfigError, match=r"tls\.key_file"):
        ServerTls(cert_file=one.cert, key_file=two.key)
    with pytest.raises(ConfigError, match=r"missing\.crt"):
        ServerTls(cert_file=tmp_path / "missing.crt", key_file=one.key)
    with pytest.raises(ConfigError, match=r"tls\.client_ca_file"):
        ServerTls(cert_file=one.cert, key_file=one.key, client_ca_file=one.key)


def test_a_key_that_nobody_can_open_is_refused_and_nobody_is_asked(tmp_path: Path, server_authority: Authority) -> None:
    pair = server_authority.issue("server")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"passphrase")
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    with pytest.raises(ConfigError, match=r"tls\.key_file .* is encrypted"):
        ServerTls(cert_file=pair.cert, key_file=pair.key)


@pytest.mark.parametrize("file", ["cert", "key", "authorities"])
def test_what_is_shown_while_files_are_being_replaced_is_what_was_good(server_authority: Authority, file: str) -> None:
    """One of them is gone for a moment, or half written."""
    pair = server_authority.issue("server")
    tls = ServerTls(cert_file=pair.cert, key_file=pair.key, client_ca_file=server_authority.pem)
    before, version = tls.pems(), tls.version()
    path = {"cert": pair.cert, "key": pair.key, "authorities": server_authority.pem}[file]
    whole = path.read_bytes()
    path.unlink()
    assert (tls.pems(), tls.version()) == (before, version)
    path.write_bytes(whole[:200])
    assert (tls.pems(), tls.version()) == (before, version)
    path.write_bytes(whole)
    assert tls.pems() == before
    assert tls.version() != version


@pytest.mark.parametrize("asks_clients", [False, True])
async def test_tools_believe_the_very_certificate_of_the_router_and_no_other(
    tmp_path: Path, server_authority: Authority, client_authority: Authority, *, asks_clients: bool
) -> None:
    """Whoever has signed it: the tools know the file, and no authority."""
    own, peer = server_authority.issue("server"), client_authority.issue("peer")
    client_ca = client_authority.pem if asks_clients else None
    async with grpc_server(ServerTls(cert_file=own.cert, key_file=own.key, client_ca_file=client_ca)) as port:
        files = {"cert_file": own.cert, "key_file": own.key, "client_ca_file": client_ca}
        files |= {"peer_cert_file": peer.cert, "peer_key_file": peer.key, "peer_ca_file": client_authority.pem}
        router = RouterSettings(grpc_port=port, admin_port=9999)
        config = ClusterConfig(router=router, tls=TlsSettings.model_validate(files))
        other = server_authority.issue("other")
        tls = config.tls.model_copy(update={"cert_file": other.cert, "key_file": other.key})
        for settings, answers in (config, True), (config.model_copy(update={"tls": tls}), False):
            async with open_router_channel(settings) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await channel.unary_unary("/none/None")(b"", timeout=2)
                assert (failure.value.code() is grpc.StatusCode.UNIMPLEMENTED) == answers
