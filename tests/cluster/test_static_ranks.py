"""Ranks at given addresses: believed by their signature, dropped when they are gone, back when they answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

import grpc

from tests.cluster.conftest import free_port
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.static_ranks import SILENT_POLLS_MAX, RankServicer, StaticRanks
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.credentials import ClusterSecret
from whalepod.core.ids import RankId, mint_incarnation
from whalepod.engine.interface import RankLoad

SECRET = ClusterSecret(b"the secret of these ranks")


@dataclass
class Rank:
    """A server that describes itself."""

    info: RankInfo
    secret: ClusterSecret = SECRET
    port: int = 0

    async def start(self) -> None:
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        describe = lambda: replace(self.info, time_unix_ms=SYSTEM_CLOCK.unix_ms())  # noqa: E731
        RankServicer(describe, secret=self.secret).register(self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def rank(name: str, role: RankRole = RankRole.DECODE, *, layout: str = "B=64") -> Rank:
    info = RankInfo(
        rank_id=RankId(name),
        role=role,
        pool=role.value,
        address="10.0.0.9:1",
        incarnation=mint_incarnation(),
        model="whale",
        namespace=layout.encode().ljust(16),
        layout=layout,
        context_tokens_max=1000,
        load=RankLoad(running=3, slots_total=8),
    )
    return Rank(info)


def table_of(*ranks: Rank, changes: list[list[str]] | None = None) -> StaticRanks:
    def on_change(table: Mapping[RankId, RankInfo]) -> None:
        if changes is not None:
            changes.append(sorted(table))

    return StaticRanks([one.address for one in ranks], secret=SECRET, on_change=on_change)


async def test_ranks_are_known_by_what_they_say_and_reached_where_they_were_said_to_be() -> None:
    one, two = rank("decode-0"), rank("prefill-0", RankRole.PREFILL_FULL)
    await one.start()
    await two.start()
    changes: list[list[str]] = []
    table = table_of(one, two, changes=changes)
    await table.poll()
    assert changes == [["decode-0", "prefill-0"]]
    assert table.ranks[RankId("decode-0")].address == one.address
    assert table.ranks[RankId("decode-0")].load.running == 3
    await table.poll()
    assert len(changes) == 1, "load alone is no change"
    await table.stop()
    await one.server.stop(None)
    await two.server.stop(None)


async def test_a_rank_that_is_gone_leaves_the_table_and_comes_back() -> None:
    one = rank("decode-0")
    await one.start()
    table = table_of(one)
    await table.poll()
    table.report_lost(RankId("decode-0"), one.info.incarnation)
    assert not table.ranks
    await table.poll()
    assert set(table.ranks) == {"decode-0"}, "it answers: only a link was broken"
    await one.server.stop(None)
    await table.poll()
    assert not table.ranks
    await one.start()
    async with asyncio.timeout(10):
        while not table.ranks:
            await table.poll()
            await asyncio.sleep(0.02)
    assert set(table.ranks) == {"decode-0"}
    await table.stop()
    await one.server.stop(None)


async def test_a3_strangers_namesakes_and_other_layouts_are_refused() -> None:
    good, namesake, other = rank("decode-0"), rank("decode-0"), rank("decode-1", layout="B=256")
    stranger = rank("decode-2")
    stranger.secret = ClusterSecret(b"another secret, as long")
    everyone = (good, namesake, other, stranger)
    for one in everyone:
        await one.start()
    table = table_of(*everyone)
    await table.poll()
    await table.poll()
    assert [info.address for info in table.ranks.values()] == [good.address]
    await table.stop()
    for one in everyone:
        await one.server.stop(None)


async def test_a_table_is_settled_once_every_address_was_heard_from_or_given_up() -> None:
    one, refuses = rank("decode-0"), rank("decode-1")
    await one.start()
    refuses.port = free_port()
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()  # it accepts, and says nothing
    addresses = [one.address, refuses.address, f"127.0.0.1:{silent.getsockname()[1]}"]
    table = StaticRanks(addresses, secret=SECRET, on_change=lambda _: None)
    await table.poll()
    assert list(table.ranks) == ["decode-0"]
    assert not table.settled
    for _ in range(SILENT_POLLS_MAX - 1):
        await table.poll()
    assert table.settled
    await table.stop()
    silent.close()
    await one.server.stop(None)
