"""Debian's Chromium, as tests start it."""

from __future__ import annotations

import shutil

CHROMIUM = shutil.which("chromium")
MISSING = "chromium is not installed (Debian's package)"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
