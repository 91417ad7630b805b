"""Where a user's files go (XDG Base Directory)."""

from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """For what running processes leave for each other: `$XDG_STATE_HOME/whalepod`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "whalepod"
