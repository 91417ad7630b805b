"""The thread of a rank that keeps it in its context-parallel group, for as long as the rank lives.

    head      form ─▶ offer the group to its engine ─▶ … broken, or asked to ─▶ form anew
    others    form ─▶ asleep, until the head wakes them ─▶ take part in one segment ─▶ asleep ─▶ …

A step that breaks leaves the head without a group: it computes alone until there is one again. Members of a group that
has no head sleep.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.engine.expert_parallel.group_loop import Formed, Membership, MembershipEndedError
from whalepod.engine.expert_parallel.timed_transport import TimedTransport
from whalepod.engine.expert_parallel.transport import GroupBrokenError, Transport
from whalepod.model.context_parallel import zigzag

log = logging.getLogger(__name__)

HEAD = 0
"""Its index in its group: the rank that routers send prompts to."""


class ContextMembership(Membership, Protocol):
    def tell_head(self, epoch: int, number: int, *, stored: bool) -> None:
        """What became of a block that was entrusted to this rank. For any thread; never waits. If it cannot be told,
        the group ends."""
        ...


@dataclass(frozen=True, slots=True)
class ContextState:
    """What operators see."""

    epoch: int = 0
    members: tuple[int, ...] = ()
    """Indices in the group of the ranks that compute together now."""
    reforms: int = 0
    rows_divided: int = 0
    rows_alone: int = 0
    copied_bytes: int = 0
    """State that each of the others was sent."""
    blocks_entrusted: int = 0
    """Blocks that others were to store."""


@dataclass(slots=True)
class _Entered:
    """A group that this rank is in."""

    formed: Formed
    transport: TimedTransport
    rounds: int = 0
    ends: bool = False

    def helps(self, rows: int) -> bool:
        members = self.formed.members
        return not self.ends and members[0] == HEAD and bool(zigzag(rows, len(members)))


class ContextLoop:
    """`segment` is for one thread at a time, at the head only; `woken`, `ask_to_reform` and `break_group` for any."""

    def __init__(
        self,
        membership: ContextMembership,
        *,
        is_head: bool,
        on_failure: Callable[[BaseException], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`on_failure` is called once, on the loop's thread, if it ends by itself."""
        self.is_head = is_head
        self.follow: Callable[[Transport], None] | None = None
        """What a rank that is no head does with an order. Set before `start`."""
        self.ready = threading.Event()
        """The rank has been in a group."""
        self.state = ContextState()
        self._membership = membership
        self._on_failure = on_failure
        self._clock = clock
        self._changed = threading.Condition()
        self._entered: _Entered | None = None
        self._in_use = False
        self._woken = (0, 0)
        self._entrusted: dict[int, Future[bool]] = {}
        self._entrusted_count = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="context-group", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave the group. Idempotent."""
        with self._changed:
            self._stopping = True
        self.break_group()
        self._thread.join(10.0)

    @contextmanager
    def segment(self, rows: int) -> Generator[Transport | None]:
        """The group, woken, for one segment of this head; None: there is none, or it is too large for so few rows. What
        is raised inside breaks it."""
        with self._changed:
            entered = self._entered
            if entered is not None and entered.helps(rows) and not self._stopping:
                self._in_use = True
                entered.rounds += 1
            else:
                entered = None
        if entered is None:
            yield None
            return
        self._membership.wake(entered.formed.epoch, entered.rounds)
        try:
            yield entered.transport
        except BaseException:
            self.break_group()
            raise
        finally:
            entered.transport.computing_since_s = None
            with self._changed:
                self._in_use = False
                self._changed.notify_all()

    def entrust(self) -> tuple[int, Future[bool]]:
        """A number for a block that another rank is to store, and whether it will have done so. If the group ends
        before that is known, it has not."""
        with self._changed:
            self._entrusted_count += 1
            number, stored = self._entrusted_count, Future[bool]()
            self._entrusted[number] = stored
            self.state = replace(self.state, blocks_entrusted=number)
        return number, stored

    def was_stored(self, epoch: int, number: int, *, stored: bool) -> None:
        """Another rank tells of a block that was entrusted to it."""
        with self._changed:
            answer = self._entrusted.pop(number, None) if epoch == self.state.epoch else None
        if answer is not None:
            answer.set_result(stored)

    def tell_head(self, epoch: int, number: int, stored: bool) -> None:
        """Of a block that was entrusted to this rank."""
        self._membership.tell_head(epoch, number, stored=stored)

    def note(self, *, divided: int = 0, alone: int = 0, copied_bytes: int = 0) -> None:
        """Count what the head has computed, in rows."""
        with self._changed:
            state = self.state
            self.state = replace(
                state,
                rows_divided=state.rows_divided + divided,
                rows_alone=state.rows_alone + alone,
                copied_bytes=state.copied_bytes + copied_bytes,
            )

    @property
    def epoch(self) -> int:
        """Of the group that it is in, or was in last."""
        return self.state.epoch

    def woken(self, epoch: int, round_number: int) -> None:
        """The head has a segment."""
        with self._changed:
            self._woken = max(self._woken, (epoch, round_number))
            self._changed.notify_all()

    def ask_to_reform(self) -> None:
        """End the group after the segment, so that somebody can join."""
        with self._changed:
            if self._entered is not None:
                self._entered.ends = True
            self._changed.notify_all()

    def break_group(self) -> None:
        """A rank of the group is lost, or what it computes cannot go on: let nobody wait for it."""
        with self._changed:
            entered = self._entered
            if entered is not None:
                entered.ends = True
            self._changed.notify_all()
        if entered is not None:
            entered.transport.close()

    @property
    def computing_since_s(self) -> float | None:
        """Since when this rank has been computing without having to wait for another; None: it is not."""
        entered = self._entered
        return None if entered is None else entered.transport.computing_since_s

    @property
    def forming(self) -> bool:
        return self._entered is None

    def _main(self) -> None:
        try:
            while not self._stopping:
                entered = self._enter(self._membership.form({}))
                try:
                    while self._wait(entered):
                        self._take_part(entered)
                except GroupBrokenError as error:
                    if not self._stopping:
                        log.warning("the context group broke: %s", error)
                finally:
                    self._leave(entered)
        except MembershipEndedError:
            pass
        except BaseException as error:
            log.critical("the context group's loop failed", exc_info=error)
            self._on_failure(error)

    def _enter(self, formed: Formed) -> _Entered:
        entered = _Entered(formed, TimedTransport(formed.transport, self._clock))
        with self._changed:
            reforms = self.state.reforms + (self.state.epoch > 0)
            self.state = replace(self.state, epoch=formed.epoch, members=formed.members, reforms=reforms)
            self._entered = entered
        self.ready.set()
        log.info("context group %d: ranks %s", formed.epoch, formed.members)
        return entered

    def _wait(self, entered: _Entered) -> bool:
        """Until the head has a segment for this rank; False: the group ends."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopping
                    or (entered.ends and not self._in_use)
                    or self._woken >= (entered.formed.epoch, entered.rounds + 1)
                )
            )
            if self._stopping or entered.ends:
                return False
            entered.rounds += 1
            return True

    def _take_part(self, entered: _Entered) -> None:
        assert self.follow is not None, "only ranks that follow are woken"
        try:
            self.follow(entered.transport)
        except (GroupBrokenError, AssertionError):
            raise
        except Exception as error:
            log.exception("this rank cannot compute its part of a prompt")
            raise GroupBrokenError(str(error)) from None
        finally:
            entered.transport.computing_since_s = None

    def _leave(self, entered: _Entered) -> None:
        """So that nobody waits for this rank, nor this one for another."""
        with self._changed:
            self._entered = None
            self.state = replace(self.state, members=())
            unanswered, self._entrusted = self._entrusted, {}
        for answer in unanswered.values():
            answer.set_result(False)
        entered.transport.close()
        entered.formed.mover.close()


@dataclass(frozen=True, slots=True)
class ContextShare:
    """A rank's place among those that compute prompts together."""

    loop: ContextLoop
    rows_min: int
    """Segments of fewer rows are computed by one rank."""
