"""Which GPUs a process may use: `CUDA_VISIBLE_DEVICES` as CUDA's driver reads it (580 was asked, case by case).

An entry is an index, or `GPU-` and the first digits of a UUID, dashes or none; whichever the first entry is, the others
must be too. The first entry that names no device ends the list: -1 is the usual one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"

_UUID_PREFIX = "GPU-"
_UUID_DIGITS = 32
_INDEX = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")


def visible_devices(
    variable: str | None, uuids: Sequence[str], *, offset: int = 0, count: int | None = None
) -> tuple[int, ...]:
    """Indexes, among all devices of the machine, of those that a process sees, in the order in which it counts them.

    variable  value of CUDA_VISIBLE_DEVICES; None: unset, which hides nothing
    uuids     of the machine's devices by index, `GPU-xxxxxxxx-xxxx-…`
    offset    visible devices to skip, those of the processes before this one
    count     visible devices to take after them; None: the rest

    Raises ConfigError if a device is named twice (CUDA then starts no process at all), or if fewer than offset + count
    are visible.
    """
    visible = tuple(range(len(uuids))) if variable is None else _parsed(variable, uuids)
    wanted = offset + (0 if count is None else count)
    if offset < 0 or (count is not None and count < 0):
        raise ConfigError(f"offset and count of devices must be at least 0, not {offset} and {count}")
    if wanted > len(visible):
        shown = "unset" if variable is None else repr(variable)
        raise ConfigError(
            f"devices up to the {wanted}th are wanted, but {len(visible)} are visible ({VARIABLE} is {shown})"
        )
    return visible[offset:] if count is None else visible[offset:wanted]


def _parsed(variable: str, uuids: Sequence[str]) -> tuple[int, ...]:
    entries = variable.split(",")
    by_uuid = entries[0].startswith(_UUID_PREFIX)
    found: list[int] = []
    for entry in entries:
        index = _index_of_uuid(entry, uuids) if by_uuid else _index_of_number(entry, len(uuids))
        if index is None:
            break
        if index in found:
            raise ConfigError(f"{VARIABLE} names device {index} twice: {variable!r}")
        found.append(index)
    return tuple(found)


def _index_of_number(entry: str, devices: int) -> int | None:
    """What follows the number is ignored; a number too large for 64 bits becomes the largest; 32 bits of it count."""
    match = _INDEX.match(entry)
    if match is None:
        return None
    number = min(max(int(match.group(1)), -(2**63)), 2**63 - 1) % 2**32
    return number if number < devices else None


def _index_of_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """None unless exactly one device's UUID begins so."""
    digits = entry.removeprefix(_UUID_PREFIX).replace("-", "").lower()[:_UUID_DIGITS]
    if not digits or not entry.startswith(_UUID_PREFIX):
        return None
    matching = [index for index, uuid in enumerate(uuids) if _digits_of(uuid).startswith(digits)]
    return matching[0] if len(matching) == 1 else None


def _digits_of(uuid: str) -> str:
    return uuid.removeprefix(_UUID_PREFIX).replace("-", "").lower()
