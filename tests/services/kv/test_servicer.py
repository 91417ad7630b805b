"""The KV service over gRPC, against a real Redis."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import pytest
import redis.asyncio as aioredis

from tests.cluster.conftest import free_port
from tests.kvstore.test_store_faults import until
from tests.kvstore.values import LAYOUT, NAMESPACE, chain, soon, to_put
from tests.own_ports import with_own_ports
from whalepod.cluster.config import METRICS_PORT_OFFSET, ClusterConfig
from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
from whalepod.cluster.liveness import HealthProber, Liveness
from whalepod.cluster.purge_epochs import PurgeEpochs, raise_epoch
from whalepod.core.errors import ConfigError
from whalepod.core.ids import Incarnation
from whalepod.kvstore.client import BlockToPut, KvClient
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.store_keys import owner_tag
from whalepod.rpc.kv.v1 import kv_pb2, kv_pb2_grpc
from whalepod.services.kv import servicer
from whalepod.services.kv.process import run_kv_service


@asynccontextmanager
async def serving(*, policy: str = "volatile-ttl") -> AsyncGenerator[tuple[kv_pb2_grpc.KvServiceStub, ClusterConfig]]:
    base = with_own_ports(ClusterConfig())
    port = free_port()
    config = ClusterConfig.model_validate({**base.model_dump(), "kv": {"port": port, "maxmemory_policy": policy}})
    stop, ready = asyncio.Event(), asyncio.Event()
    with EmbeddedRedis(EmbeddedRedisSettings(port=config.redis_port, memory_bytes=64 << 20)):
        task = asyncio.create_task(run_kv_service(config, stop=stop, on_ready=ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            await task
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield kv_pb2_grpc.KvServiceStub(channel), config
        stop.set()
        await task


def store(config: ClusterConfig, tenant: str, *, blocks: int) -> None:
    settings = StoreSettings(addresses=(StoreAddress.parse(config.redis_url_or_embedded),))
    client = KvClient(settings, namespace=NAMESPACE, layout=LAYOUT, incarnation=Incarnation(3))
    put = to_put(chain(blocks, salt=tenant.encode()))
    owned = [BlockToPut(block.key, block.payload, block.exact, owner_tag(tenant)) for block in put]
    assert client.put_blocks(owned, deadline=soon()) == blocks
    client.close()


def metrics_page(config: ClusterConfig, *, blocks: int) -> str:
    """Once it shows so many."""
    pages: list[str] = []

    def told() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{config.kv.port + METRICS_PORT_OFFSET}/metrics") as page:
            pages.append(page.read().decode())
        return f'whalepod_kv_stored_values{{kind="block"}} {blocks}.0' in pages[-1]

    assert until(told, within_s=10)
    return pages[-1]


async def test_f29_stats_and_purges_are_served_with_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "TEND_EVERY_S", 0.05)
    monkeypatch.setattr(servicer, "SHOW_EVERY_S", 0.0)
    async with serving() as (stub, config):
        await asyncio.to_thread(store, config, "one", blocks=5)
        await asyncio.to_thread(store, config, "other", blocks=2)
        stats = await stub.GetStats(kv_pb2.GetStatsRequest())
        assert stats.blocks == 7
        assert {usage.owner for usage in stats.owners} == {owner_tag("one"), owner_tag("other")}
        page = await asyncio.to_thread(metrics_page, config, blocks=7)
        assert (
            f'whalepod_kv_owner_bytes{{owner="{owner_tag("one"):016x}"}} {5 * (LAYOUT.payload_bytes + 256)}.0' in page
        )
        assert "whalepod_kv_memory_max_bytes 6.7108864e+07" in page
        purged = await stub.Purge(kv_pb2.PurgeRequest(tenant="one"))
        assert purged.keys_removed == 5
        assert (await stub.GetStats(kv_pb2.GetStatsRequest())).blocks == 2
        assert (await stub.Purge(kv_pb2.PurgeRequest(writer=3))).keys_removed == 2
        epochs = PurgeEpochs()
        async with aioredis.Redis(port=config.redis_port) as client:
            await epochs.read(client)
        assert epochs.of("one") > 0
        assert epochs.of("other") == 0
        prober = HealthProber()
        assert await prober.probe(f"127.0.0.1:{config.kv.port}") is Liveness.SERVING
        await prober.close()


async def test_a_purge_that_a_router_wrote_down_is_carried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "TEND_EVERY_S", 0.05)
    async with serving() as (stub, config):
        async with aioredis.Redis(port=config.redis_port) as client:

            async def blocks_left(count: int) -> None:
                async with asyncio.timeout(5):
                    while (await stub.GetStats(kv_pb2.GetStatsRequest())).blocks != count:
                        await asyncio.sleep(0.02)

            await asyncio.to_thread(store, config, "one", blocks=5)
            await asyncio.to_thread(store, config, "other", blocks=2)
            await raise_epoch(client, "one", 7)
            await blocks_left(2)
            await asyncio.to_thread(store, config, "one", blocks=5)
            await asyncio.sleep(0.2)
            await blocks_left(7)
            await raise_epoch(client, "one", 8)
            await blocks_left(2)


@pytest.mark.parametrize("request_", [kv_pb2.PurgeRequest(), kv_pb2.PurgeRequest(namespace=b"short")])
async def test_a_purge_of_nothing_in_particular_is_refused(request_: kv_pb2.PurgeRequest) -> None:
    async with serving() as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Purge(request_)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_server_with_another_policy_is_refused_by_both_names() -> None:
    with pytest.raises(ConfigError, match=r"volatile-ttl.*noeviction"):
        async with serving(policy="noeviction"):
            pass
