"""What one rank may hold and do in a step. Parsed by the process that starts the rank; read once."""

from __future__ import annotations

from dataclasses import dataclass

from whalepod.core.errors import ConfigError

from .speculation.options import SpeculationOptions


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Raises ConfigError, naming the setting, on values that cannot work."""

    slots: int = 16
    """Requests that hold device state at a time."""
    blocks: int | None = None
    """Device blocks; None: what `memory_bytes` leaves beside the weights, else room for `slots` contexts at most."""
    memory_bytes: int | None = None
    """For weights, blocks and windows together; None: no limit."""
    chunk_tokens: int = 512
    """Prompt rows of a step that holds no decode row, at most."""
    chunk_tokens_beside_decode: int = 128
    """Prompt, replayed and recomputed rows of a step that holds decode rows, at most: no such row stalls a batch."""
    async_scheduling: bool = True
    """Plan a step while the one before it is computed. Changes no token."""
    speculation: SpeculationOptions | None = None
    """None: one token a step."""
    waiting_max: int = 256
    """Accepted requests that hold nothing yet. One more is refused."""
    soft_slots: int = 32
    """Of those, requests that wait for a hand-off."""
    context_tokens_max: int | None = None
    """Longest prompt plus answer; None: the model's, or what the blocks hold."""
    prefix_reuse: bool = True
    """Reuse blocks of earlier requests on the device or from the store."""
    load_timeout_s: float = 2.0
    """A fetch of stored state that takes longer is a miss."""
    prefetch_bytes: int = 256 << 20
    """Stored blocks in host memory, fetched for requests that await their hand-off. The rest is fetched then."""
    publish_timeout_s: float = 5.0
    """A hand-off whose writes take longer is reported as not stored."""
    publish_queue_bytes: int = 256 << 20
    """Copied state that waits to be stored. What does not fit is dropped, or, for a hand-off, copied later."""
    crash_tokens: int = 512
    """An `exact` request leaves all of its state in the store about every so many tokens of output."""
    parked_bytes: int = 1 << 30
    """State of preempted requests in host memory. What does not fit is computed again."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk_tokens", "chunk_tokens_beside_decode", "waiting_max", "soft_slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.blocks is not None and self.blocks < 1:
            raise ConfigError(f"blocks must be at least 1, not {self.blocks}")
        if self.crash_tokens < 1:
            raise ConfigError(f"crash_tokens must be at least 1, not {self.crash_tokens}")
        if self.load_timeout_s <= 0 or self.publish_timeout_s <= 0:
            raise ConfigError("load_timeout_s and publish_timeout_s must be above 0")
