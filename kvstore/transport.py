"""The one small interface of everything that moves values: put and get by key, batched, with deadlines.

A batch holds keys of one place. What a place does not answer is `None` or `UNKNOWN`, never an exception; nothing takes
longer than its deadline. Two implementations: `RedisTransport`, through which a decode rank also reads from a prefill
rank's host memory, and `FaultyTransport`, which keeps values in this process and misbehaves by a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

from whalepod.core.clock import Deadline

from .native_reads import Foreseen
from .native_writes import Drafts
from .value_format import BytesLike, payload_checksum, with_checksums
from .value_mac import ValueMac


class ValueSink(Protocol):
    """Where one value goes. One thread calls `open` once if the value exists, then `finish` if it was taken."""

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        """Judge the value's first bytes (256, or all of a shorter one); returns where the rest goes, None to refuse
        it."""
        ...

    def finish(self, *, payload_hash: int | None = None) -> None:
        """The rest is in place. `payload_hash`: xxh3-64 of its last piece, if somebody has taken it."""
        ...


class Asked(Protocol):
    """Some values that have been asked for before anybody knew where they go."""

    def drop(self, *, deadline: Deadline) -> None:
        """No `read` will be about them. Nothing happens if one has been."""
        ...


class ValueSinks(Protocol):
    """Where the values of one batch go."""

    @property
    def asked(self) -> Asked | None:
        """What the first of them may have been asked for with (`ValueTransport.ask`)."""
        ...

    @property
    def keys(self) -> Sequence[bytes]:
        """All of one length."""
        ...

    def __getitem__(self, item: int) -> ValueSink: ...

    def foresee(self, items: Sequence[int]) -> Foreseen | None:
        """Where some values may be received before `open`, if they have exactly that length. None: their lengths are
        not known."""
        ...

    def take(self, items: Sequence[int], verdicts: bytes) -> None:
        """These values are in the places foreseen, and somebody has checked that all of each is as its header says;
        `Verdict.NONE`: that one is to be judged with its sink all the same."""
        ...


class ValueToWrite:
    """One value as pieces that follow each other. `life_ms`: how long the store should keep it."""

    __slots__ = ("_draft", "_mac", "_pieces", "key", "life_ms", "value_bytes")

    def __init__(self, key: bytes, pieces: tuple[BytesLike, ...], life_ms: int) -> None:
        self.key = key
        self.life_ms = life_ms
        self.value_bytes = sum(map(len, pieces))
        self._pieces: tuple[BytesLike, ...] | None = pieces
        self._draft: tuple[bytes, tuple[BytesLike, ...]] = b"", ()
        self._mac: ValueMac | None = None

    @classmethod
    def drafted(
        cls,
        key: bytes,
        head: bytes,
        payload: tuple[BytesLike, ...],
        *,
        life_ms: int,
        value_bytes: int,
        mac: ValueMac | None,
    ) -> Self:
        """Of a header without its two checksums. They, and the MAC if there is one, are made when somebody asks for the
        pieces: while the server is busy with the values before."""
        value = cls.__new__(cls)
        value.key, value.life_ms, value.value_bytes = key, life_ms, value_bytes
        value._pieces, value._draft, value._mac = None, (head, payload), mac
        return value

    @property
    def pieces(self) -> tuple[BytesLike, ...]:
        if self._pieces is None:
            head, follows = self._draft
            if self._mac is not None:
                follows = (self._mac.extension(head, follows), *follows)
            self._pieces = (with_checksums(head, payload_checksum(follows)), *follows)
        return self._pieces


class ValuesToWrite(Protocol):
    """A batch of values of one length, whose keys are of one length too."""

    @property
    def keys(self) -> Sequence[bytes]: ...

    @property
    def lives_ms(self) -> Sequence[int]:
        """How long the store should keep each."""
        ...

    @property
    def value_bytes(self) -> int:
        """Of one."""
        ...

    @property
    def can_spread(self) -> bool:
        """One thread sends them over several connections at once; there are `drafts`, as far as is known."""
        ...

    def __getitem__(self, item: int) -> ValueToWrite: ...

    def drafts(self, items: Sequence[int]) -> Drafts | None:
        """Some values for who writes the checksums himself. None: they have to be made one by one."""
        ...


class MadeValues:
    """Values that somebody has made one by one."""

    can_spread = False

    def __init__(self, values: Sequence[ValueToWrite]) -> None:
        self._values = values
        self.keys = [value.key for value in values]
        self.lives_ms = [value.life_ms for value in values]
        self.value_bytes = max((value.value_bytes for value in values), default=0)
        assert all(value.value_bytes == self.value_bytes for value in values), "values of one batch have one length"

    def __getitem__(self, item: int) -> ValueToWrite:
        return self._values[item]

    def drafts(self, items: Sequence[int]) -> Drafts | None:  # noqa: ARG002  theirs are stamped
        return None


class Written(Enum):
    STORED = "stored"
    PRESENT = "present"
    """Somebody's value is there already."""
    DROPPED = "dropped"
    """The server answered no."""
    UNKNOWN = "unknown"
    """No answer. It may or may not be there, which is harmless: names are content."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The life one key should have at least."""

    key: bytes
    life_ms: int


class Place(Protocol):
    """Where a batch goes: one server, as this process sees it. Hashable."""

    @property
    def name(self) -> str: ...

    @property
    def available(self) -> bool:
        """As far as is known."""
        ...

    @property
    def disabled_by(self) -> str | None:
        """Why it will never be used again by this process; None: it may be."""
        ...

    @property
    def is_local(self) -> bool:
        """It is on this machine."""
        ...

    @property
    def read_bytes_per_s(self) -> float | None:
        """How fast values have come from it lately; None: not known."""
        ...

    def note_corrupt(self) -> None:
        """A value from it was wrong."""
        ...


class ValueTransport(Protocol):
    """Thread-safe."""

    @property
    def shards(self) -> Sequence[Place]:
        """Empty: there is no store."""
        ...

    def shard_of(self, key: bytes) -> Place:
        """Needs at least one server."""
        ...

    def exists(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bool] | None:
        """Whether each key is there. None: the server did not say."""
        ...

    def ask(self, keys: Sequence[bytes]) -> Asked | None:
        """Ask for the first values of a batch that is about to be read, if a connection is idle: the server works while
        the rest of the batch is prepared. None: nothing was asked."""
        ...

    def read(
        self,
        shard: Place,
        sinks: ValueSinks,
        *,
        value_bytes: int,
        renewals: Sequence[Renewal] = (),
        deadline: Deadline,
    ) -> bool:
        """Read one batch into its sinks; True if the server answered for every key. `value_bytes`: about how much in
        total. `renewals` are keys of the same batch."""
        ...

    def write(self, shard: Place, values: ValuesToWrite, *, only_if_absent: bool, deadline: Deadline) -> list[Written]:
        """Write one batch; one outcome a value."""
        ...

    def heads(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bytes] | None:
        """The first 256 bytes of each value (empty: not there). None: the server did not say."""
        ...

    def replace_if(self, shard: Place, value: ValueToWrite, *, head: bytes, deadline: Deadline) -> bool:
        """Overwrite the value that still begins with `head`; True if it was that one."""
        ...

    def delete_if(self, shard: Place, key: bytes, *, head: bytes, value_bytes: int, deadline: Deadline) -> bool:
        """Remove the value that begins with `head` and has this length, and no other; True if it was that one."""
        ...

    def renew(self, shard: Place, renewals: Sequence[Renewal], *, deadline: Deadline) -> bool:
        """Lengthen lives, never shorten one; False if the server did not do it."""
        ...

    def unlink(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> int:
        """Keys removed, as far as the server has answered."""
        ...

    def close(self) -> None: ...
