"""Groups of engines that divide prompts, threads of this process: loops and orders as in serving, bytes in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from tests.engine.engine_world import OPTIONS, World, tiny_model
from tests.engine.memory_store import MemoryStore
from whalepod.engine.context_parallel.loop import ContextLoop, ContextShare
from whalepod.engine.engine import Engine
from whalepod.engine.expert_parallel.group_loop import Formed, MembershipEndedError
from whalepod.engine.expert_parallel.transport import MemoryHub
from whalepod.engine.options import RankOptions
from whalepod.engine.state_store import StateStore
from whalepod.engine.transfers import Transfers
from whalepod.model.tensor_layout import ModelRole

PATIENCE_S = 30.0


class Hall:
    """Where the ranks meet. A group forms of whom the test says."""

    def __init__(self) -> None:
        self.loops: list[ContextLoop] = []
        self._changed = threading.Condition()
        self._epoch = 0
        self._formed: Mapping[int, Formed] = {}
        self._over = False

    def form(self, members: Sequence[int]) -> None:
        """A group of these, once each of them asks for one."""
        hubs = [MemoryHub(len(members), timeout_s=PATIENCE_S) for _ in range(2)]
        with self._changed:
            self._epoch += 1
            self._formed = {
                index: Formed(
                    self._epoch, tuple(members), ({},) * len(members), *(hub.transports()[rank] for hub in hubs)
                )
                for rank, index in enumerate(members)
            }
            self._changed.notify_all()

    def wait_for(self, index: int, after: int) -> Formed:
        with self._changed:
            self._changed.wait_for(lambda: self._over or (index in self._formed and self._epoch > after))
            if self._over:
                raise MembershipEndedError
            return self._formed[index]

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for loop in self.loops:
            loop.stop()


class MemoryMembership:
    """A Membership."""

    def __init__(self, hall: Hall, index: int) -> None:
        self._hall = hall
        self._index = index
        self._epoch = 0

    def form(self, held: Mapping[str, Sequence[int]]) -> Formed:
        assert not held
        formed = self._hall.wait_for(self._index, self._epoch)
        self._epoch = formed.epoch
        return formed

    def wake(self, epoch: int, round_number: int) -> None:
        for index, loop in enumerate(self._hall.loops):
            if index != self._index:
                loop.woken(epoch, round_number)

    def tell_head(self, epoch: int, number: int, *, stored: bool) -> None:
        self._hall.loops[0].was_stored(epoch, number, stored=stored)


class ContextWorld(World):
    """The head's engine, with `ranks - 1` more that follow it."""

    def __init__(
        self,
        ranks: int,
        *,
        store: StateStore | None = None,
        options: RankOptions = OPTIONS,
        role: ModelRole = ModelRole.FULL,
        rows_min: int = 8,
        store_blocks: bool = True,
    ) -> None:
        """`store_blocks`: the ranks that follow have a connection to the store of their own, `stores`."""
        self.hall = Hall()
        self.failures: list[BaseException] = []
        models = []
        for index in range(ranks):
            loop = ContextLoop(MemoryMembership(self.hall, index), is_head=index == 0, on_failure=self.failures.append)
            self.hall.loops.append(loop)
            models.append(replace(tiny_model(role), context=ContextShare(loop, rows_min)))
        super().__init__(store=store, options=options, model=models[0])
        self.stores = [
            MemoryStore(store.blocks, store.snapshots)
            for _ in models[1:]
            if store_blocks and isinstance(store, MemoryStore)
        ]
        self.followers = [
            Engine(model, options, store=own, deliver=lambda _: None)
            for model, own in zip_longest(models[1:], self.stores)
        ]
        for follower in self.followers:
            if follower.transfers is not None:
                threading.Thread(target=keep_writing, args=(follower.transfers,), daemon=True).start()
        for loop in self.hall.loops:
            loop.start()
        self.form(range(ranks))

    @property
    def head(self) -> ContextLoop:
        return self.hall.loops[0]

    def form(self, members: Sequence[int]) -> None:
        """And wait until the head is in it."""
        self.head.ready.clear()
        self.hall.form(members)
        assert self.head.ready.wait(PATIENCE_S)

    def close(self) -> None:
        for follower in self.followers:
            if follower.transfers is not None:
                follower.transfers.close()
        self.hall.close()
        assert not self.failures


def keep_writing(transfers: Transfers) -> None:
    """As a rank's thread does."""
    while transfers.work_on_write(wait=True):
        pass
