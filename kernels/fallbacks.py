"""Where an operation on a GPU runs its plain version: logged once for each reason, and counted."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

_counts: Counter[tuple[str, str]] = Counter()


def note_fallback(operation: str, reason: str) -> None:
    """Say once, and count always, that `operation` runs its reference version because of `reason`."""
    _counts[operation, reason] += 1
    if _counts[operation, reason] == 1:
        logger.warning("%s runs its reference version: %s", operation, reason)


def fallback_counts() -> dict[tuple[str, str], int]:
    """How often each (operation, reason) fell back since the process started."""
    return dict(_counts)
