"""What the head of a group tells the others before each segment that they compute together.

gather [bytes of the header, bytes of state] ─▶ exchange: header (JSON), then state, from rank 0 to every other
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whalepod.core.block_keys import BlockHash, BlockKey
from whalepod.engine.expert_parallel.transport import Transport
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches


@dataclass(frozen=True, slots=True)
class EntrustedBlock:
    """A block that is full after the segment, to be stored by the rank that computes its last row."""

    rank: int
    number: int
    """The head knows it by this."""
    block: int
    """Where it is in the caches."""
    hash: str
    parent: str
    """As the name of its run, hexadecimal."""
    depth: int
    run: str
    exact: bool
    owner: int
    """On whose account."""
    life_s: float
    """After so long nobody waits for it."""

    @classmethod
    def of(
        cls, key: BlockKey, *, rank: int, number: int, block: int, exact: bool, owner: int, life_s: float
    ) -> EntrustedBlock:
        hexes = {"hash": key.hash.hex(), "parent": key.parent.hex(), "run": key.run.hex()}
        return cls(
            rank=rank, number=number, block=block, depth=key.depth, exact=exact, owner=owner, life_s=life_s, **hexes
        )

    @property
    def key(self) -> BlockKey:
        own, parent = BlockHash(bytes.fromhex(self.hash)), BlockHash(bytes.fromhex(self.parent))
        return BlockKey(own, parent, self.depth, bytes.fromhex(self.run))


@dataclass(frozen=True, slots=True)
class Order:
    """One segment for all ranks of a group."""

    start: int
    token_ids: tuple[int, ...]
    history: tuple[int, ...]
    slot: int
    block_table: tuple[int, ...]
    floor: int
    window_start: int
    write_start: int
    logits_start: int | None
    whole_batches: bool
    """As the head computes it (`kernels/numerics.py`)."""
    copied_blocks: tuple[int, ...] | None
    """Blocks whose records come with the order, and with them the rings of the slot; None: the others have all that
    this segment reads."""
    entrusted: tuple[EntrustedBlock, ...]
    cache_blocks: int
    cache_slots: int

    @classmethod
    def of(
        cls,
        segment: Segment,
        caches: Caches,
        *,
        whole_batches: bool,
        copied_blocks: Sequence[int] | None,
        entrusted: Sequence[EntrustedBlock] = (),
    ) -> Order:
        assert not segment.images, "rows of images are not divided over ranks"
        return cls(
            start=segment.start,
            token_ids=tuple(segment.token_ids),
            history=tuple(segment.history),
            slot=segment.slot,
            block_table=tuple(segment.block_table),
            floor=segment.floor,
            window_start=segment.window_start,
            write_start=segment.write_start,
            logits_start=segment.logits_start,
            whole_batches=whole_batches,
            copied_blocks=None if copied_blocks is None else tuple(copied_blocks),
            entrusted=tuple(entrusted),
            cache_blocks=_blocks_total(caches),
            cache_slots=_slots_total(caches),
        )

    @property
    def segment(self) -> Segment:
        return Segment(
            slot=self.slot,
            block_table=self.block_table,
            start=self.start,
            token_ids=self.token_ids,
            history=self.history,
            floor=self.floor,
            window_start=self.window_start,
            write_start=self.write_start,
            logits_start=self.logits_start,
        )

    def check(self, caches: Caches) -> None:
        """Assert that these caches are numbered as the head's are."""
        own, heads = (_blocks_total(caches), _slots_total(caches)), (self.cache_blocks, self.cache_slots)
        assert own == heads, f"ranks of a group hold {heads} and {own} blocks and slots: give their pool `blocks`"


def send_order(transport: Transport, order: Order, caches: Caches) -> int:
    """From the head, which is rank 0, to all others. Bytes of state that went to each. Raises GroupBrokenError."""
    header = torch.from_numpy(np.frombuffer(json.dumps(asdict(order)).encode(), dtype=np.uint8).copy())
    state = torch.zeros(0, dtype=torch.uint8)
    if order.copied_blocks is not None:
        state = _read_state(caches, order.slot, order.copied_blocks)
    others = transport.size - 1
    transport.gather(torch.tensor([len(header), len(state)], dtype=torch.int64))
    message = torch.cat((header.to(state.device), state))
    transport.exchange(message.repeat(others), [0] + [len(message)] * others, [0] * transport.size)
    return len(state)


def receive_order(transport: Transport, caches: Caches) -> Order:
    """The next one, once its state has been written to `caches`. Raises GroupBrokenError."""
    sizes = transport.gather(torch.zeros(2, dtype=torch.int64))[0].tolist()
    nothing = torch.zeros(0, dtype=torch.uint8, device=caches.device)
    others = transport.size - 1
    message = transport.exchange(nothing, [0] * transport.size, [sum(sizes)] + [0] * others)
    values = json.loads(message[: sizes[0]].cpu().numpy().tobytes())
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    fields["entrusted"] = tuple(EntrustedBlock(**block) for block in values["entrusted"])
    order = Order(**fields)
    order.check(caches)
    if order.copied_blocks is not None:
        _write_state(caches, order.slot, order.copied_blocks, message[sizes[0] :])
    return order


def _read_state(caches: Caches, slot: int, blocks: Sequence[int]) -> Tensor:
    """[bytes] uint8: all records of these blocks, then the rings of the slot."""
    return torch.cat(
        [pool[index].contiguous().view(torch.uint8).flatten() for pool, index in _state(caches, slot, blocks)]
    )


def _write_state(caches: Caches, slot: int, blocks: Sequence[int], state: Tensor) -> None:
    offset = 0
    for pool, index in _state(caches, slot, blocks):
        size = len(index) * pool[0].numel() * pool.element_size()
        records = state[offset : offset + size].clone().view(pool.dtype)  # a copy begins where its dtype may
        pool[index] = records.view(len(index), *pool.shape[1:])
        offset += size
    assert offset == len(state), (offset, len(state))


def _state(caches: Caches, slot: int, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """What a segment may read of the rows before it: tensors, and which of their rows. It never reads draft windows."""
    own = torch.tensor([slot], device=caches.device)
    held = torch.tensor(blocks, dtype=torch.int64, device=caches.device)
    for pools, index in (
        (caches.global_kv, held),
        (caches.index_keys, held),
        (caches.windows, own),
        (caches.groups, own),
    ):
        for key in sorted(pools):
            yield pools[key], index


def _blocks_total(caches: Caches) -> int:
    return len(next(iter(caches.global_kv.values())))


def _slots_total(caches: Caches) -> int:
    return len(caches.windows[0])
