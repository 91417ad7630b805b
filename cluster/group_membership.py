"""Which ranks form a group that computes together, agreed among the ranks alone: no Ray head, no Redis. A pool that
shares its experts is one such group; ranks that divide prompts are several to a pool. Indices are those in the group.

    probe all ─▶ one of them works in a group ─▶ ask it to end that after its step, come again
               └▶ nobody does ─▶ the lowest index that answers leads: it waits for the others, and decides
    watch the next rank of the group: gone ▶ end the group; silent ▶ end its process too, so that it cannot come back

The rank's event loop runs the talking, the loop's thread waits in `form`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.ids import Incarnation
from whalepod.engine.context_parallel.loop import HEAD, ContextLoop
from whalepod.engine.expert_parallel.group_loop import Formed, Held, MembershipEndedError
from whalepod.engine.expert_parallel.joining import Meeting, join_group
from whalepod.engine.expert_parallel.process_group import open_store
from whalepod.engine.expert_parallel.transport import GroupBrokenError
from whalepod.rpc.group.v1 import group_pb2

from .group_messages import held_from_proto, held_to_proto
from .group_peers import GroupPeers
from .process_place import ProcessPlace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MembershipOptions:
    start_patience_s: float = 120.0
    """How long the first group of a pool waits for all of its ranks."""
    gather_patience_s: float = 3.0
    """How long whoever leads waits for ranks that answered."""
    pause_s: float = 0.1
    watch_interval_s: float = 0.5
    hung_after_s: float = 4.0
    """A rank that has not answered for so long is taken for hung, and its process is ended."""
    heal_interval_s: float = 3.0
    """How often the first rank of an incomplete group looks for the missing ones."""
    form_timeout_s: float = 10.0
    exchange_timeout_s: float = 60.0


class GroupedLoop(Protocol):
    """What a rank's group is for: `GroupLoop` of shared experts, `ContextLoop` of divided prompts. For any thread."""

    @property
    def forming(self) -> bool:
        """It is in no group."""
        ...

    def woken(self, epoch: int, round_number: int) -> None: ...

    def ask_to_reform(self) -> None:
        """End the group soon, between two steps."""
        ...

    def break_group(self) -> None:
        """End it now: a rank of it is lost."""
        ...


class GroupMembership:
    """One rank's. Made on the event loop; `form` and `wake` are for the loop's thread."""

    def __init__(
        self,
        peers: GroupPeers,
        *,
        incarnation: Incarnation,
        host: str,
        device: str = "cpu",
        options: MembershipOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`host`: the address that the other ranks reach this one at. `device`: what this rank computes on."""
        self._peers = peers
        self._incarnation = incarnation
        self._host = host
        self._device = device
        self._options = options or MembershipOptions()
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._place = ProcessPlace.own()
        self._places: dict[int, ProcessPlace] = {}
        """Where the others ran when they last answered: one may fall silent before it is first watched."""
        self._epoch = 0
        self._members: tuple[int, ...] = ()
        self._running = False
        self._stopping = False
        self._leading: dict[int, asyncio.Future[group_pb2.JoinResponse]] | None = None
        self._joined: dict[int, group_pb2.JoinRequest] = {}
        self._joined_changed = asyncio.Event()
        self._group_loop: GroupedLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._store: object = None
        """Of the group that this rank leads: it lives as long as the group."""

    def attach(self, group_loop: GroupedLoop) -> None:
        """Whose group this is. Before anything else."""
        self._group_loop = group_loop
        self._watcher = asyncio.create_task(self._watch(), name="group-watcher")

    async def stop(self) -> None:
        self._stopping = True
        self._joined_changed.set()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._peers.close()

    # For the loop's thread.

    def form(self, held: Held) -> Formed:
        while True:
            group = self._call(self._agree(held))
            try:
                return self._connect(group)
            except GroupBrokenError as error:
                log.warning("group %d did not form: %s", group.epoch, error)

    def wake(self, epoch: int, round_number: int) -> None:
        others = [index for index in self._members if index != self._peers.index]
        self._loop.call_soon_threadsafe(self._peers.wake, others, epoch, round_number)

    def tell_head(self, epoch: int, number: int, *, stored: bool) -> None:
        """For any thread."""
        if not self._stopping and not self._loop.is_closed():
            request = group_pb2.StoredRequest(epoch=epoch, number=number, stored=stored)
            self._loop.call_soon_threadsafe(self._peers.tell_stored, HEAD, request, partial(self._untold, epoch))

    def _call(self, coroutine: Coroutine[Any, Any, group_pb2.Group]) -> group_pb2.Group:
        if self._stopping or self._loop.is_closed():
            coroutine.close()
            raise MembershipEndedError
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except CancelledError:  # `stop` closes the links that it waits on
            if self._stopping:
                raise MembershipEndedError from None
            raise

    def _connect(self, group: group_pb2.Group) -> Formed:
        """Raises GroupBrokenError."""
        indices = [member.index for member in group.members]
        rank = indices.index(self._peers.index)
        form_timeout_s = self._options.form_timeout_s
        store = open_store(group.store_host, group.store_port, is_host=False, timeout_s=form_timeout_s)
        meeting = Meeting(
            store,
            str(group.epoch),
            rank=rank,
            size=len(indices),
            host=self._host,
            timeout_s=self._options.exchange_timeout_s,
            form_timeout_s=form_timeout_s,
        )
        steps, mover = join_group(meeting, self._device)
        self._loop.call_soon_threadsafe(self._note_running, group.epoch, tuple(indices))
        return Formed(
            epoch=group.epoch,
            members=tuple(indices),
            held=tuple(held_from_proto(member.held) for member in group.members),
            transport=steps,
            mover=mover,
        )

    # For the event loop.

    @property
    def size(self) -> int:
        """Ranks of the whole pool."""
        return self._peers.size

    def describe(self, asker: int) -> group_pb2.ProbeResponse:
        """For another rank, `asker`, or for an onlooker."""
        self._peers.heard_from(asker)
        place = self._place
        return group_pb2.ProbeResponse(
            incarnation=self._incarnation,
            epoch=self._epoch,
            running=self._working,
            members=self._members,
            place=group_pb2.ProcessPlace(host=place.host, pid=place.pid, start_ticks=place.start_ticks),
            leaving=self._stopping,
        )

    @property
    def _working(self) -> bool:
        return self._running and self._group_loop is not None and not self._group_loop.forming

    async def joining(self, request: group_pb2.JoinRequest) -> group_pb2.JoinResponse:
        """Another rank wants to be in the next group."""
        if self._working:
            log.info("rank %d wants to join: the group ends after its step", request.index)
            assert self._group_loop is not None
            self._group_loop.ask_to_reform()
            return group_pb2.JoinResponse()
        if self._leading is None:
            return group_pb2.JoinResponse()
        self._joined[request.index] = request
        self._joined_changed.set()
        decided = self._leading.setdefault(request.index, self._loop.create_future())
        return await asyncio.shield(decided)

    def was_stored(self, request: group_pb2.StoredRequest) -> None:
        if isinstance(self._group_loop, ContextLoop):
            self._group_loop.was_stored(request.epoch, request.number, stored=request.stored)

    def _untold(self, epoch: int) -> None:
        """The head waits for what it cannot be told, as long as there is this group."""
        if self._group_loop is not None and self._epoch == epoch:
            self._group_loop.break_group()

    def woken(self, epoch: int, round_number: int) -> None:
        if self._group_loop is not None:
            self._group_loop.woken(epoch, round_number)

    def _note_running(self, epoch: int, members: tuple[int, ...]) -> None:
        self._epoch, self._members, self._running = epoch, members, True

    async def _agree(self, held: Held) -> group_pb2.Group:
        """The next group that this rank is in. Raises MembershipEndedError."""
        self._running = False
        own = group_pb2.JoinRequest(
            index=self._peers.index, incarnation=self._incarnation, epoch=self._epoch, held=held_to_proto(held)
        )
        start = Deadline.after(self._options.start_patience_s if self._epoch == 0 else 0.0, self._clock)
        while not self._stopping:
            answers = await self._peers.probe_all()
            self._places |= {peer: _place_of(answer) for peer, answer in answers.items()}
            working = next((peer for peer, answer in answers.items() if answer.running), None)
            leader = min((self._peers.index, *answers))
            known = max((self._epoch, *(answer.epoch for answer in answers.values())))
            starting = known == 0 and len(answers) + 1 < self._peers.size and not start.expired
            asked = leader if working is None else working
            group = None
            if asked == self._peers.index and not starting:
                group = await self._lead(own, answers, known + 1)
            elif working is not None or not starting:  # whoever works may have begun to lead since it was probed
                group = await self._peers.join(asked, own, timeout_s=2 * self._options.gather_patience_s)
            if group is not None:
                return group
            await asyncio.sleep(self._options.pause_s)
        raise MembershipEndedError

    async def _lead(
        self, own: group_pb2.JoinRequest, answers: Mapping[int, group_pb2.ProbeResponse], epoch: int
    ) -> group_pb2.Group | None:
        """Wait for those that answered, and decide. None: nobody came although somebody should have."""
        self._leading, self._joined = {}, {own.index: own}
        try:
            patience = Deadline.after(self._options.gather_patience_s, self._clock)
            while not set(answers) <= set(self._joined) and not patience.expired and not self._stopping:
                self._joined_changed.clear()
                try:
                    async with asyncio.timeout(patience.remaining_s()):
                        await self._joined_changed.wait()
                except TimeoutError:
                    break
            if answers and len(self._joined) == 1:
                return None
            store = await asyncio.to_thread(
                open_store, self._host, 0, is_host=True, timeout_s=self._options.exchange_timeout_s
            )
            self._store = store
            group = group_pb2.Group(
                epoch=epoch,
                members=[
                    group_pb2.Member(index=index, incarnation=request.incarnation, held=request.held)
                    for index, request in sorted(self._joined.items())
                ],
                store_host=self._host,
                store_port=store.port,
            )
            for index, waiting in self._leading.items():
                if not waiting.done():
                    waiting.set_result(group_pb2.JoinResponse(group=group if index in self._joined else None))
            return group
        finally:
            for waiting in self._leading.values():
                if not waiting.done():
                    waiting.set_result(group_pb2.JoinResponse())
            self._leading = None

    async def _watch(self) -> None:
        """One rank looks after the next in the ring; the first looks for those that are missing."""
        missed_since: float | None = None
        place: ProcessPlace | None = None
        heal = Deadline.after(self._options.heal_interval_s, self._clock)
        watched: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(self._options.watch_interval_s)
            if not self._working or len(self._members) < 2:
                continue
            peer = self._next_member()
            if watched != (self._epoch, peer):
                watched, missed_since, place = (self._epoch, peer), None, self._places.get(peer)
            answer = await self._peers.probe(peer)
            present = answer is not None and answer.running and answer.epoch == self._epoch
            if answer is not None:  # a process that lives and has left is not to be ended
                place = _place_of(answer) if present else None
            now_s = self._clock.monotonic_s()
            if present:
                missed_since = None
            elif missed_since is None:
                missed_since = now_s
            patience_s = 0.0 if answer is not None and answer.leaving else self._options.hung_after_s
            if missed_since is not None and now_s - missed_since >= patience_s and self._working:
                self._end_missing(peer, place, missed_s=now_s - missed_since)
                missed_since = None
            if heal.expired:
                heal = Deadline.after(self._options.heal_interval_s, self._clock)
                await self._heal()

    def _next_member(self) -> int:
        place = self._members.index(self._peers.index)
        return self._members[(place + 1) % len(self._members)]

    def _end_missing(self, peer: int, place: ProcessPlace | None, *, missed_s: float) -> None:
        killed = place is not None and place.kill()
        log.error(
            "rank %d has been missing for %.1f s: %s",
            peer,
            missed_s,
            "its process was ended" if killed else "the group goes on without it",
        )
        assert self._group_loop is not None
        self._group_loop.break_group()

    async def _heal(self) -> None:
        """Two halves of a pool that lost sight of each other become one again."""
        missing = set(range(self._peers.size)) - set(self._members)
        if not missing or self._members[0] != self._peers.index:
            return
        for peer in sorted(missing):
            answer = await self._peers.probe(peer)
            if answer is not None and answer.running and min(answer.members, default=peer) < self._members[0]:
                assert self._group_loop is not None
                self._group_loop.ask_to_reform()
                return


def _place_of(answer: group_pb2.ProbeResponse) -> ProcessPlace:
    return ProcessPlace(answer.place.host, answer.place.pid, answer.place.start_ticks)
