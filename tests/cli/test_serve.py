"""`whalepod serve` refuses what cannot work before it starts anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_folder_that_is_no_checkpoint_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whalepod", "serve", "--model", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "config.json does not exist" in result.stderr
    assert "starting" not in result.stdout
