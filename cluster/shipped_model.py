"""The model that is served when none is named: it is part of the package, a link in a checkout and files in a wheel."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from whalepod.core.errors import CheckpointError

SHIPPED_MODEL_NAME = "whalepod-tiny"


def shipped_model_dir() -> Path:
    """Its checkpoint directory. Raises CheckpointError if this installation lacks it."""
    directory = Path(str(resources.files("whalepod").joinpath("models", SHIPPED_MODEL_NAME))).resolve()
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"the model that ships is not in this installation ({directory}): name another (--model)")
    return directory
