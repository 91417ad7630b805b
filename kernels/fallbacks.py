"""Where an operation runs a slower version of itself than the machine has: logged once for each reason, and counted."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

_counts: Counter[tuple[str, str]] = Counter()


def note_fallback(operation: str, reason: str, *, runs: str = "its reference version") -> None:
    """Say once, and count always, that `operation` runs what `runs` says because of `reason`."""
    _counts[operation, reason] += 1
    if _counts[operation, reason] == 1:
        logger.warning("%s runs %s: %s", operation, runs, reason)


def fallback_counts() -> dict[tuple[str, str], int]:
    """How often each (operation, reason) fell back since the process started."""
    return dict(_counts)
