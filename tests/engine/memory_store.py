"""A store in memory that misbehaves on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockHash, BlockKey
from whalepod.core.clock import Deadline
from whalepod.kvstore.client import BlockToPut, Fetched
from whalepod.kvstore.value_format import SnapshotValue


@dataclass(slots=True)
class MemoryStore:
    """Keeps what it is given. The hooks decide, call by call, what it does not take, has lost, or hands out changed."""

    blocks: dict[BlockHash, tuple[bytes, bool]] = field(default_factory=dict)
    snapshots: dict[bytes, SnapshotValue] = field(default_factory=dict)
    takes: Callable[[], bool] = lambda: True
    has: Callable[[], bool] = lambda: True
    changed: Callable[[SnapshotValue], SnapshotValue] = lambda value: value
    lives: dict[bytes, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    touched: list[Sequence[BlockKey]] = field(default_factory=list)

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> int:
        self.calls.append("lookup")
        return self._leading(keys, exact_only=False)

    def fetch_blocks(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        *,
        deadline: Deadline,
        exact_only: bool = False,
        handed_off_by: str | None = None,
        block_worth_s: float | None = None,
    ) -> Fetched:
        self.calls.append(f"fetch {len(keys)}")
        count = self._leading(keys, exact_only=exact_only)
        for key, buffer in zip(keys[:count], buffers, strict=False):
            buffer[:] = self.blocks[key.hash][0]
        return Fetched(count, tuple(self.blocks[key.hash][1] for key in keys[:count]))

    def touch(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> bool:
        self.touched.append(keys)
        return self.takes()

    def put_blocks(self, blocks: Sequence[BlockToPut], *, deadline: Deadline) -> int:
        self.calls.append(f"put {len(blocks)}")
        for count, block in enumerate(blocks):
            if not self.takes():
                return count
            known = self.blocks.get(block.key.hash)
            if known is None or (block.exact and not known[1]):
                payload = block.payload
                assert isinstance(payload, memoryview)
                self.blocks[block.key.hash] = (bytes(payload), block.exact)
        return len(blocks)

    def put_snapshot(self, key: bytes, value: SnapshotValue, *, ttl_s: float, deadline: Deadline) -> bool:
        self.calls.append("put_snapshot")
        if not self.takes():
            return False
        self.snapshots[key] = value
        self.lives[key] = ttl_s
        return True

    def get_snapshot(
        self, key: bytes, *, deadline: Deadline, unlink: bool = False, handed_off_by: str | None = None
    ) -> SnapshotValue | None:
        self.calls.append("get_snapshot")
        value = self.snapshots.get(key) if self.has() else None
        if unlink:
            self.snapshots.pop(key, None)
        return self.changed(value) if value is not None else None

    def unlink(self, keys: Sequence[bytes], *, deadline: Deadline) -> int:
        self.calls.append("unlink")
        return sum(self.snapshots.pop(key, None) is not None for key in keys)

    def handoffs(self) -> list[bytes]:
        return [key for key in self.snapshots if key.startswith(b"h:")]

    def turns(self) -> list[bytes]:
        return [key for key in self.snapshots if key.startswith(b"t:")]

    def crashes(self) -> list[bytes]:
        return [key for key in self.snapshots if key.startswith(b"c:")]

    def _leading(self, keys: Sequence[BlockKey], *, exact_only: bool) -> int:
        for count, key in enumerate(keys):
            block = self.blocks.get(key.hash)
            if block is None or (exact_only and not block[1]) or not self.has():
                return count
        return len(keys)
