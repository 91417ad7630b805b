"""The model that is served when none is named: the one in the package. While there is none, a random one, written once
into the user's cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

from whalepod.core.errors import CheckpointError

SHIPPED_MODEL_NAME = "whalepod-tiny"
_WRITTEN_BY = (
    "tiny_checkpoint.py", "random_weights.py", "checkpoint_writer.py", "tensor_layout.py", "assets/tokenizer.json",
)  # fmt: skip


def shipped_model_dir(cache_dir: Path) -> Path:
    """The checkpoint directory; a random one is written if it is not there, which takes some seconds. Raises
    CheckpointError."""
    packaged = Path(str(resources.files("whalepod").joinpath("models", SHIPPED_MODEL_NAME)))
    if (packaged / "config.json").is_file():
        return packaged.resolve()
    directory = cache_dir / f"{SHIPPED_MODEL_NAME}-{_fingerprint()}"
    if directory.is_dir():
        return directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="writing-", dir=cache_dir))
    try:
        _write(draft / "model")
        (draft / "model").rename(directory)  # whoever looks sees all of it or nothing
    except OSError as error:
        if not directory.is_dir():  # else another process was first, with the same bytes
            raise CheckpointError(f"{directory} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _write(directory: Path) -> None:
    """In a process of its own, so that this one need not load torch."""
    command = [sys.executable, "-m", "whalepod", "checkpoint", "tiny", str(directory)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        raise CheckpointError(f"the model that ships could not be written into {directory}")


def _fingerprint() -> str:
    """Names what writes the model: other code may write other weights."""
    digest = hashlib.sha256()
    for name in _WRITTEN_BY:
        digest.update(resources.files("whalepod.model").joinpath(name).read_bytes())
    return digest.hexdigest()[:12]
