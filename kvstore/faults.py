"""What can go wrong with a server, and what each thing means for the next step (`kvstore.md` §8, F1–F12).

A `StoreFault` ends one connection: nobody knows what its next bytes would be. An `ErrorReply` is an answer like any
other; the connection is sound. Neither leaves this folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self

_IN_SCRIPT = re.compile(r"Error running script .*@user_script: ?\d+: -?([A-Z]+ .*)")
"""How Redis 6.2 passes on what a command inside a script was answered; 7 sends that answer itself."""


class FaultReason(Enum):
    CONNECT = "connect"
    TIMEOUT = "timeout"
    RESET = "reset"
    PROTOCOL = "protocol"
    STALE = "stale"
    """An idle connection had bytes or an end waiting."""
    UNAVAILABLE = "unavailable"
    """The server answered that it cannot serve."""
    REFUSED = "refused"
    """The server will not have us: wrong or missing credentials or permissions."""
    MOVED = "moved"
    """The name may point to another server by now."""
    OVERSIZE = "oversize"
    """A value too long to be worth reading to its end."""

    @property
    def counts_against_server(self) -> bool:
        return self not in (FaultReason.STALE, FaultReason.MOVED, FaultReason.OVERSIZE, FaultReason.REFUSED)


class StoreFault(Exception):
    """The connection is in doubt and must be closed."""

    def __init__(self, reason: FaultReason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """`-CODE message`."""

    code: str
    message: str

    @classmethod
    def parse(cls, text: str, *, chars_max: int) -> Self:
        """`text`: what follows the minus. An error of a command inside a script is that error. `chars_max`: so much of
        the message is kept."""
        code, _, message = text.partition(" ")
        if code == "ERR" and (inner := _IN_SCRIPT.match(message)) is not None:
            code, _, message = inner[1].partition(" ")
        return cls(code, message[:chars_max])


class Meaning(Enum):
    DROP = "drop"
    """This command was refused; the server is fine."""
    UNAVAILABLE = "unavailable"
    """The server cannot serve now: counts against it."""
    MOVED = "moved"
    """This server became a replica: reconnect, its name may lead to the new primary."""
    REFUSED = "refused"
    """Permanent for this process."""
    NO_SCRIPT = "no_script"
    STRANGE = "strange"
    """Under a name of ours lies something that we cannot have written."""
    BUG = "bug"
    """We should not have sent this."""


ERROR_MEANINGS: Mapping[str, Meaning] = {
    "OOM": Meaning.DROP,
    "MISCONF": Meaning.DROP,
    "NOREPLICAS": Meaning.DROP,
    "MOVED": Meaning.DROP,
    "ASK": Meaning.DROP,
    "TRYAGAIN": Meaning.DROP,
    "READONLY": Meaning.MOVED,
    "LOADING": Meaning.UNAVAILABLE,
    "BUSY": Meaning.UNAVAILABLE,
    "CLUSTERDOWN": Meaning.UNAVAILABLE,
    "MASTERDOWN": Meaning.UNAVAILABLE,
    "NOAUTH": Meaning.REFUSED,
    "WRONGPASS": Meaning.REFUSED,
    "NOPERM": Meaning.REFUSED,
    "NOSCRIPT": Meaning.NO_SCRIPT,
    "CROSSSLOT": Meaning.BUG,
    "WRONGTYPE": Meaning.STRANGE,
    "ERR": Meaning.BUG,
}


def meaning_of(error: ErrorReply) -> Meaning:
    """An unknown code is a refusal of one command, not of the server."""
    if error.message.startswith("max number of clients"):  # it has no code of its own, and it passes
        return Meaning.UNAVAILABLE
    return ERROR_MEANINGS.get(error.code, Meaning.DROP)


def raise_if_server_wide(error: ErrorReply) -> None:
    """Raises StoreFault if no other command on this connection would do better."""
    match meaning_of(error):
        case Meaning.UNAVAILABLE:
            raise StoreFault(FaultReason.UNAVAILABLE, error.code)
        case Meaning.MOVED:
            raise StoreFault(FaultReason.MOVED, error.code)
        case Meaning.REFUSED:
            raise StoreFault(FaultReason.REFUSED, f"{error.code} {error.message}")
        case _:
            return


def code_label(error: ErrorReply) -> str:
    """The code if it is a known one, else `other`: a server cannot invent metric labels."""
    return error.code if error.code in ERROR_MEANINGS else "other"
