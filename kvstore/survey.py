"""What is in the store, read from the names and headers of its blocks: for people, quotas, purges and the evictor.

SCAN ──▶ GETRANGE of 256 bytes and PTTL for each block not known yet, PTTL alone for the others ──▶ StoredBlock
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from whalepod.core.clock import Clock, Deadline

from .faults import ErrorReply, FaultReason, StoreFault
from .resp import Reply, RespConnection, command
from .settings import StoreAddress
from .value_format import HEADER_BYTES, Header, parse_header

SCAN_COUNT = 500
CALL_S = 5.0
IMAGES_BEGIN = b"e:"
PATTERNS = (b"b:*", IMAGES_BEGIN + b"*")
"""Names of what is stored on somebody's account."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, or the rows of one image, as its header says. `left_ms`: until it expires."""

    key: bytes
    hash: bytes
    parent: bytes
    namespace: bytes
    owner: int
    writer: int
    value_bytes: int
    left_ms: int
    created_unix_ms: int = 0

    @property
    def is_image(self) -> bool:
        return self.key.startswith(IMAGES_BEGIN)


class StoreAdmin:
    """One server, looked after over a connection of its own. For one thread. Every call raises StoreFault if the server
    does not answer in time."""

    def __init__(self, address: StoreAddress, *, clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self._connection: RespConnection | None = None
        self._known: dict[bytes, tuple[Header, int]] = {}

    def ask(self, *commands: Sequence[bytes]) -> list[Reply]:
        """Replies to a pipeline, errors among them."""
        deadline = Deadline.after(CALL_S, self._clock)
        try:
            connection = self._connected(deadline)
            connection.send([b"".join(command(*words) for words in commands)], deadline=deadline)
            return [connection.read_reply(deadline=deadline) for _ in commands]
        except StoreFault:
            self.close()
            raise

    def blocks(self) -> list[StoredBlock]:
        """All of them, and the rows of images. What changes meanwhile may be missing."""
        found: list[StoredBlock] = []
        for keys in (keys for pattern in PATTERNS for keys in self.scan(pattern)):
            new = [key for key in keys if key not in self._known]
            replies = self.ask(*(words for key in new for words in _header_commands(key))) if new else []
            for key, head, size in zip(new, replies[::2], replies[1::2], strict=True):
                header = parse_header(head) if isinstance(head, bytes) else None
                if isinstance(header, Header) and isinstance(size, int):
                    self._known[key] = (header, size)
            lives = self.ask(*([b"PTTL", key] for key in keys))
            found += [
                _stored(key, *self._known[key], left_ms)
                for key, left_ms in zip(keys, lives, strict=True)
                if key in self._known and isinstance(left_ms, int) and left_ms != GONE
            ]
        here = {block.key for block in found}
        self._known = {key: known for key, known in self._known.items() if key in here}
        return found

    def scan(self, pattern: bytes) -> Iterator[list[bytes]]:
        """Names that match, some hundred at a time, each at most once a time."""
        cursor = b"0"
        while True:
            (reply,) = self.ask([b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT])
            match reply:
                case [bytes(cursor), list(names)]:
                    keys = list(dict.fromkeys(name for name in names if isinstance(name, bytes)))
                case _:
                    raise StoreFault(FaultReason.PROTOCOL, f"SCAN: {reply}")
            if keys:
                yield keys
            if cursor == b"0":
                return

    def unlink(self, keys: Iterable[bytes]) -> int:
        """How many were there."""
        wanted = list(keys)
        removed = 0
        for start in range(0, len(wanted), SCAN_COUNT):
            replies = self.ask(*([b"UNLINK", key] for key in wanted[start : start + SCAN_COUNT]))
            removed += sum(reply for reply in replies if isinstance(reply, int))
        return removed

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, deadline: Deadline) -> RespConnection:
        if self._connection is None or not self._connection.quiet:
            self.close()
            self._connection = RespConnection.connect(self.address, deadline=deadline)
            if self.address.password:
                user = (self.address.username.encode(),) if self.address.username else ()
                words = (b"AUTH", *user, self.address.password.encode())
                self._connection.send([command(*words)], deadline=deadline)
                if isinstance(reply := self._connection.read_reply(deadline=deadline), ErrorReply):
                    raise StoreFault(FaultReason.REFUSED, reply.code)
        return self._connection


GONE = -2
"""What PTTL says of a key that is not there."""


def _header_commands(key: bytes) -> tuple[Sequence[bytes], Sequence[bytes]]:
    return [b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES - 1)], [b"STRLEN", key]


def _stored(key: bytes, header: Header, value_bytes: int, left_ms: int) -> StoredBlock:
    return StoredBlock(
        key=key,
        hash=header.identity,
        parent=header.parent,
        namespace=header.namespace,
        owner=header.draft_fingerprint,
        writer=header.writer,
        value_bytes=value_bytes,
        left_ms=left_ms,
        created_unix_ms=header.created_unix_ms,
    )
