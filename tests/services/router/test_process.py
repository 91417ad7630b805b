"""A router as a process: real Redis, real signals, real ports."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pydantic import SecretStr

from tests.cluster.certificates import Authority
from tests.own_ports import with_own_ports
from tests.services.router.fake_ranks import SECRET, Behaviour, FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import FakeRank, router_config, until
from whalepod.client import AsyncClient
from whalepod.cluster.config import ClusterConfig, TlsSettings
from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
from whalepod.cluster.fault_switch import sign_order
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.registrar import Registrar
from whalepod.cluster.registration_store import connect_registry
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.errors import ConfigError, UnavailableError
from whalepod.rpc.fault.v1 import fault_pb2, fault_pb2_grpc
from whalepod.services.router.process import run_router

PROMPT = [400 + index % 90 for index in range(40)]


@pytest.fixture
async def config(model_dir: Path) -> AsyncIterator[ClusterConfig]:
    """Free ports, and a Redis on one of them."""
    wanted = with_own_ports(router_config(model_dir, drain_seconds=10.0))
    redis = EmbeddedRedis(EmbeddedRedisSettings(port=wanted.redis_port, memory_bytes=32 << 20))
    await asyncio.to_thread(redis.start)
    try:
        yield wanted
    finally:
        await asyncio.to_thread(redis.stop)


@asynccontextmanager
async def registered(config: ClusterConfig, ranks: Sequence[FakeRank]) -> AsyncGenerator[None, None]:
    """Fake ranks that join as real ones do."""
    async with AsyncExitStack() as stack:
        for rank in ranks:
            await rank.server.start()
            stack.push_async_callback(rank.server.kill)
            registrar = Registrar(
                redis_url=config.redis_url_or_embedded, secret=SECRET, describe=rank.server.info, heartbeat_s=0.2
            )
            await registrar.start()
            stack.push_async_callback(registrar.stop)
        yield


@asynccontextmanager
async def running(config: ClusterConfig) -> AsyncGenerator[httpx.AsyncClient, None]:
    """`run_router` in this process, and a client of it."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_router(config, stop=stop, on_ready=ready.set))
    try:
        await until(lambda: ready.is_set() or task.done(), timeout_s=20.0)
        if task.done():
            await task
        async with http_client(config) as client:
            yield client
    finally:
        stop.set()
        await task


def http_client(config: ClusterConfig, *, timeout_s: float = 20.0) -> httpx.AsyncClient:
    url = f"http://127.0.0.1:{config.router.http_port}"
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False, verify=False)


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20.0):
        while True:
            try:
                if (await client.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, **fields}


async def test_ranks_are_found_through_the_registry_and_served_over_both_fronts(config: ClusterConfig) -> None:
    decode, prefill = FakeDecode(), FakePrefill()
    async with registered(config, [decode, prefill]), running(config) as client:
        await until_ready(client)
        answer = (await client.post("/v1/completions", json=body())).json()
        assert answer["choices"][0]["token_ids"] == expected_ids(PROMPT, 5)
        async with AsyncClient(f"127.0.0.1:{config.router.grpc_port}") as grpc_client:
            assert list((await grpc_client.generate(PROMPT, max_tokens=5)).token_ids) == expected_ids(PROMPT, 5)


async def test_clients_come_over_tls_with_certificates_and_operators_by_their_own_port(
    config: ClusterConfig, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "ca")
    server, own = authority.issue("server"), authority.issue("client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        admin_port = int(probe.getsockname()[1])
    router = config.router.model_copy(update={"admin_port": admin_port})
    tls = TlsSettings(cert_file=server.cert, key_file=server.key, client_ca_file=authority.pem)
    config = config.model_copy(update={"router": router, "tls": tls})
    context = ssl.create_default_context(cafile=str(authority.pem))
    context.load_cert_chain(own.cert, own.key)
    credentials = grpc.ssl_channel_credentials(authority.pem.read_bytes(), own.key.read_bytes(), own.cert.read_bytes())
    async with (
        registered(config, [FakeDecode(), FakePrefill()]),
        running(config),
        httpx.AsyncClient(base_url=config.operator_url, trust_env=False) as operator,
        httpx.AsyncClient(base_url=config.public_url, trust_env=False, verify=context) as client,
        AsyncClient(f"127.0.0.1:{config.router.grpc_port}", tls=credentials) as grpc_client,
    ):
        await until_ready(operator)
        answer = (await client.post("/v1/completions", json=body())).json()
        assert answer["choices"][0]["token_ids"] == expected_ids(PROMPT, 5)
        assert list((await grpc_client.generate(PROMPT, max_tokens=5)).token_ids) == expected_ids(PROMPT, 5)
        for path in ("/metrics", "/workers"):
            assert (await operator.get(path)).status_code == 200
            assert (await client.get(path)).status_code == 404
        assert (await operator.post("/v1/completions", json=body())).status_code == 404


async def test_a_router_that_is_there_before_its_ranks_becomes_ready_with_them(config: ClusterConfig) -> None:
    async with running(config) as client:
        assert (await client.get("/readyz")).status_code == 503
        async with registered(config, [FakeDecode(), FakePrefill()]):
            await until_ready(client)


async def test_whoever_can_connect_meets_a_router_that_knows_its_ranks(config: ClusterConfig) -> None:
    """Processes that share a port are given clients as soon as they listen."""
    stop = asyncio.Event()
    async with registered(config, [FakeDecode(), FakePrefill()]), http_client(config) as client:
        async with connect_registry(config.redis_url_or_embedded) as registry:
            await registry.execute_command("CLIENT", "PAUSE", "300")
        task = asyncio.create_task(run_router(config, stop=stop))
        try:
            async with asyncio.timeout(20.0):
                while (answer := await _first_answer(client)) is None:
                    await asyncio.sleep(0.005)
            assert answer.status_code == 200, answer.text
        finally:
            stop.set()
            await task


async def _first_answer(client: httpx.AsyncClient) -> httpx.Response | None:
    """None: nobody listens."""
    try:
        return await client.post("/v1/completions", json=body())
    except httpx.ConnectError:
        return None


async def test_c15_without_a_registry_the_ranks_it_knows_go_on_serving(config: ClusterConfig, model_dir: Path) -> None:
    config = with_own_ports(router_config(model_dir))
    redis = EmbeddedRedis(EmbeddedRedisSettings(port=config.redis_port, memory_bytes=32 << 20))
    await asyncio.to_thread(redis.start)
    async with registered(config, [FakeDecode(), FakePrefill()]), running(config) as client:
        await until_ready(client)
        await asyncio.to_thread(redis.stop)
        async with asyncio.timeout(10.0):
            while (await client.get("/readyz")).json()["registry"] != "unreachable":
                await asyncio.sleep(0.05)
        answer = (await client.post("/v1/completions", json=body())).json()
        assert answer["choices"][0]["token_ids"] == expected_ids(PROMPT, 5)
        assert (await client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
async def test_a14_a_port_in_use_is_refused_by_name(config: ClusterConfig, port: str) -> None:
    taken = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", getattr(config.router, port))
    async with taken:
        with pytest.raises(ConfigError, match=port):
            await run_router(config, stop=asyncio.Event())


async def test_a_cluster_secret_that_differs_keeps_strangers_out(config: ClusterConfig) -> None:
    other = config.model_copy(update={"secret": SecretStr("another secret of 16+ bytes")})
    async with registered(config, [FakeDecode(), FakePrefill()]), running(other) as client:
        await asyncio.sleep(0.7)  # longer than a poll of the registry
        report = (await client.get("/readyz")).json()
        assert report["pools"]["decode"]["ranks"] == 0


async def test_fault_f3_sigterm_lets_streams_finish_refuses_newcomers_and_exits_with_0(
    config: ClusterConfig, tmp_path: Path
) -> None:
    decode, prefill = FakeDecode(behaviour=Behaviour(step=asyncio.Event())), FakePrefill()
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(config.model_dump(mode="json", exclude_none=True) | {"secret": SECRET.key.decode()}))
    async with registered(config, [decode, prefill]), http_client(config) as client:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "whalepod", "router", "--config", str(file), stderr=asyncio.subprocess.PIPE
        )
        try:
            await until_ready(client)
            reading = asyncio.create_task(read_stream(client))
            await until(lambda: decode.live)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5.0):
                while (await client.get("/readyz")).status_code != 503:
                    await asyncio.sleep(0.01)
            refused = await client.post("/v1/completions", json=body())
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.headers["connection"] == "close", "the next one may reach another router"
            assert (await client.get("/livez")).status_code == 200
            assert decode.behaviour.step is not None
            decode.behaviour.step.set()
            events = await reading
            assert events[-1] == "[DONE]"
            tokens = [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]
            assert tokens == expected_ids(PROMPT, 5)
            async with asyncio.timeout(10.0):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            assert process.stderr is not None
            log = (await process.stderr.read()).decode()
            await process.wait()
        assert "Traceback" not in log, log


@pytest.mark.slow
async def test_draining_past_its_limit_ends_streams_with_an_error_and_one_line_of_log(
    config: ClusterConfig, tmp_path: Path
) -> None:
    decode, prefill = FakeDecode(behaviour=Behaviour(step=asyncio.Event())), FakePrefill()
    file = tmp_path / "cluster.json"
    settings: dict[str, Any] = config.model_dump(mode="json", exclude_none=True) | {"secret": SECRET.key.decode()}
    settings["router"]["drain_seconds"] = 0.2
    file.write_text(json.dumps(settings))
    async with registered(config, [decode, prefill]), http_client(config) as client:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "whalepod", "router", "--config", str(file), stderr=asyncio.subprocess.PIPE
        )
        try:
            await until_ready(client)
            reading = asyncio.create_task(read_stream(client))
            whole = asyncio.create_task(client.post("/v1/completions", json=body()))
            remote = AsyncClient(f"127.0.0.1:{config.router.grpc_port}")
            called = asyncio.create_task(remote.generate(PROMPT, max_tokens=5))
            await until(lambda: len(decode.live) == 3)
            process.send_signal(signal.SIGTERM)
            ended = await asyncio.gather(reading, whole, called, return_exceptions=True)
            async with asyncio.timeout(10.0):
                assert await process.wait() == 0
            await remote.close()
        finally:
            if process.returncode is None:
                process.kill()
            assert process.stderr is not None
            log = (await process.stderr.read()).decode()
            await process.wait()
        lines, answer, error = ended
        assert isinstance(lines, list)
        assert isinstance(answer, httpx.Response)
        assert json.loads(lines[0])["error"]["code"] == json.loads(answer.text)["error"]["code"], "it had not begun"
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert isinstance(error, UnavailableError)
        assert "Traceback" not in log, log
        assert log.count("draining took too long") == 1


@pytest.mark.slow
async def test_a_killed_router_leaves_streams_without_an_end_and_no_work_and_another_serves_at_once(
    config: ClusterConfig, tmp_path: Path
) -> None:
    decode, prefill = FakeDecode(), FakePrefill()
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(config.model_dump(mode="json", exclude_none=True) | {"secret": SECRET.key.decode()}))
    ports = {"http_port": _free_port(), "grpc_port": _free_port()}
    second = config.model_copy(update={"router": config.router.model_copy(update=ports)})
    async with registered(config, [decode, prefill]), http_client(config) as client, running(second) as other:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "whalepod", "router", "--config", str(file), stderr=asyncio.subprocess.DEVNULL
        )
        await until_ready(client)
        prefill.behaviour.hang = True
        waiting = asyncio.create_task(client.post("/v1/completions", json=body(prompt=PROMPT * 5)))
        await until(lambda: prefill.running, timeout_s=20.0)
        decode.behaviour = Behaviour(step=asyncio.Event())
        reading = asyncio.create_task(read_stream(client))
        await until(lambda: len(decode.live) == 2, timeout_s=20.0)
        process.kill()
        await until(lambda: not decode.live and not prefill.running, timeout_s=2.0)  # on a busy machine; else at once
        for cut_off in (waiting, reading):
            with pytest.raises(httpx.HTTPError):
                await cut_off
        decode.behaviour, prefill.behaviour = Behaviour(), Behaviour()
        answer = (await other.post("/v1/completions", json=body())).json()
        assert answer["choices"][0]["token_ids"] == expected_ids(PROMPT, 5)
        await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def read_stream(client: httpx.AsyncClient) -> list[str]:
    async with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
        return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]


async def test_ranks_at_given_addresses_are_used_without_a_registry(model_dir: Path) -> None:
    decode, prefill = FakeDecode(), FakePrefill()
    await decode.server.start()
    await prefill.server.start()
    config = with_own_ports(router_config(model_dir))  # no Redis at its port
    addresses = {"decode": (decode.server.info().address,), "prefill": (prefill.server.info().address,)}
    config = config.model_copy(update={"router": config.router.model_copy(update=addresses)})
    async with running(config) as http:
        assert (await http.get("/readyz")).status_code == 200
        body = {"prompt": PROMPT * 3, "max_tokens": 4, "return_token_ids": True}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["token_ids"] == expected_ids(PROMPT * 3, 4)
        assert len(prefill.seen.starts) == 1
        another = FakeDecode("decode-1")
        await another.server.start()
        added = await http.post("/workers", json={"address": another.server.info().address})
        assert [worker["rank"] for worker in added.json()["workers"]] == ["decode-0", "decode-1", "prefill-0"]
        await another.server.kill()
        await prefill.server.kill()
        await until_ready_is(http, 503)
    await decode.server.kill()


async def until_ready_is(http: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(10):
        while (await http.get("/readyz")).status_code != status:
            await asyncio.sleep(0.05)


async def test_a_router_process_finds_and_asks_ranks_over_mutual_tls(config: ClusterConfig, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "cluster-ca")
    pair = authority.issue("peer")
    files = TlsSettings(peer_cert_file=pair.cert, peer_key_file=pair.key, peer_ca_file=authority.pem)
    decode, prefill = FakeDecode(), FakePrefill()
    decode.server.tls = prefill.server.tls = PeerTls.of(files)
    addresses = {"decode": (), "prefill": ()}
    async with registered(config, [decode, prefill]):
        for static in (False, True):
            if static:
                addresses = {one.server.role.pool: (one.server.info().address,) for one in (decode, prefill)}
            router = config.router.model_copy(update=addresses)
            async with running(config.model_copy(update={"tls": files, "router": router})) as client:
                await until_ready(client)
                assert (await client.post("/v1/completions", json=body())).status_code == 200
    assert len(decode.seen.starts) == 2


async def test_a_router_takes_orders_of_faults_only_where_they_are_allowed(config: ClusterConfig) -> None:
    for allowed in (False, True):
        one = config.model_copy(update={"fault_injection": allowed})
        async with running(one), grpc.aio.insecure_channel(f"127.0.0.1:{config.router.grpc_port}") as channel:
            order = fault_pb2.FaultOrder(
                rank_id="router", kind=fault_pb2.FAULT_KIND_DELAY, time_unix_ms=SYSTEM_CLOCK.unix_ms()
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fault_pb2_grpc.FaultServiceStub(channel).Inject(sign_order(order, SECRET))
        told = (grpc.StatusCode.INVALID_ARGUMENT, "router stores nothing") if allowed else None
        assert caught.value.code() is (grpc.StatusCode.UNIMPLEMENTED if told is None else told[0])
        assert told is None or told[1] in (caught.value.details() or "")


def test_several_processes_need_a_port_for_operators() -> None:
    with pytest.raises(ValueError, match=r"router\.admin_port is not set"):
        ClusterConfig.model_validate({"router": {"processes": 2}})
    config = ClusterConfig.model_validate({"router": {"processes": 2, "admin_port": 9500}})
    assert config.admin_ports == (9500, 9501)
    with pytest.raises(ValueError, match=r"grpc_port and admin_port \+ 1 are both port 8001"):
        ClusterConfig.model_validate({"router": {"processes": 2, "admin_port": 8000, "http_port": 7999}})
