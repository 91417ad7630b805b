"""Server scripts, bounded to the 16 blocks of a run. They use what Redis 6.2 and 7 both have."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from .resp import gather
from .value_format import BytesLike


@dataclass(frozen=True, slots=True)
class Script:
    source: bytes
    sha: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source).hexdigest().encode())


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A script with what it works on. An argument given as a tuple is one argument in pieces."""

    script: Script
    keys: Sequence[bytes]
    arguments: Sequence[bytes | tuple[BytesLike, ...]]

    def pieces(self, *, by_source: bool = False) -> list[BytesLike]:
        """The command for a gather write. `by_source` also loads the script."""
        head = (b"EVAL", self.script.source) if by_source else (b"EVALSHA", self.script.sha)
        return gather(*head, b"%d" % len(self.keys), *self.keys, *self.arguments)


RENEW = Script(
    b"""
local lives = {}
for i, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  if left >= 0 and left < tonumber(ARGV[i]) then
    redis.call('PEXPIRE', key, ARGV[i])
  end
  lives[i] = left
end
return lives
"""
)
"""ARGV[i]: milliseconds KEYS[i] should still live. Lengthens a life, never shortens one. Returns what was left of each
(-1: it had no end, -2: it is not there)."""

DELETE_IF = Script(
    b"""
if redis.call('STRLEN', KEYS[1]) == tonumber(ARGV[2])
   and redis.call('GETRANGE', KEYS[1], 0, #ARGV[1] - 1) == ARGV[1] then
  return redis.call('UNLINK', KEYS[1])
end
return 0
"""
)
"""ARGV: the value's first bytes as they were read, and its length. Removes that value and no other."""

REPLACE_IF = Script(
    b"""
if redis.call('GETRANGE', KEYS[1], 0, #ARGV[1] - 1) == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 1
end
return 0
"""
)
"""ARGV: the header as it was read, the new value, milliseconds to live."""
