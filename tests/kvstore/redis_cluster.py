"""A Redis Cluster on this machine: primaries and a replica of each, which take over from one another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import redis

from tests.kvstore.redis_server import CLUSTER_BUS_OFFSET, CLUSTER_PORTS, RedisServer, free_port
from whalepod.core.clock import Deadline
from whalepod.kvstore.slot_map import SLOTS

OPTIONS = (
    "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--appendonly", "no",
    "--repl-diskless-sync-delay", "0", "--cluster-require-full-coverage", "no",
)  # fmt: skip


class RedisCluster:
    """`primaries[i]` has the i-th part of the slots at first; `replicas[i]` follows it."""

    def __init__(self, binary: Path, folder: Path, *, size: int) -> None:
        self.primaries = [_node(binary, folder / f"p{number}") for number in range(size)]
        self.replicas = [_node(binary, folder / f"r{number}") for number in range(size)]
        try:
            self._join(size)
        except BaseException:
            self.kill()
            raise

    @property
    def nodes(self) -> list[RedisServer]:
        return [*self.primaries, *self.replicas]

    def id_of(self, node: RedisServer) -> bytes:
        return node.call("CLUSTER", "MYID")

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def _join(self, size: int) -> None:
        first = self.primaries[0]
        for node in self.nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", first.port)
        bounds = [SLOTS * number // size for number in range(size + 1)]
        for primary, start, end in zip(self.primaries, bounds[:-1], bounds[1:], strict=True):
            primary.call("CLUSTER", "ADDSLOTS", *range(start, end))
        self._until(lambda: all(self._knows_all(node) for node in self.nodes))
        for primary, replica in zip(self.primaries, self.replicas, strict=True):
            replica.call("CLUSTER", "REPLICATE", self.id_of(primary))
        self._until(lambda: all(self._is_ready(node) for node in self.nodes))

    def _knows_all(self, node: RedisServer) -> bool:
        return b"cluster_known_nodes:%d\r" % len(self.nodes) in node.call("CLUSTER", "INFO")

    def _is_ready(self, node: RedisServer) -> bool:
        info = node.call("INFO", "replication")
        linked = info["role"] == "master" or info.get("master_link_status") == "up"
        return linked and b"cluster_state:ok" in node.call("CLUSTER", "INFO")

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        deadline = Deadline.after(30)
        while not condition():
            assert not deadline.expired, "the cluster does not come up"


def _node(binary: Path, folder: Path) -> RedisServer:
    folder.mkdir()
    port = free_port(CLUSTER_PORTS, also_at=CLUSTER_BUS_OFFSET)
    return RedisServer(binary, folder, OPTIONS, port=port).start()


def move_slot(slot: int, *, source: RedisServer, target: RedisServer, source_id: bytes, target_id: bytes) -> None:
    """Begin to move a slot: its keys go one by one, by `MIGRATE`, until `end_move`."""
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)


def migrate(key: bytes, *, source: RedisServer, target: RedisServer) -> None:
    with redis.Redis(port=source.port) as client:
        client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)


def end_move(slot: int, *, nodes: list[RedisServer], target_id: bytes) -> None:
    for node in nodes:
        node.call("CLUSTER", "SETSLOT", slot, "NODE", target_id)
