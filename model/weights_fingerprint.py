"""One name for the weights in a directory: KV computed by other weights must never be found under the same namespace.

The fingerprint is a hash over the sorted names and SHA-256 hashes of the weight files. Hashing 510 GB takes minutes, so
hashes may lie beside the files in `SHA256SUMS` (as `sha256sum *.safetensors` writes it). A line counts only while its
file is not newer than `SHA256SUMS`: weights that were replaced later are hashed again and never keep the old name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from whalepod.core.errors import CheckpointError

from .checkpoint import shard_paths

SUMS_FILE = "SHA256SUMS"
READ_BYTES = 1 << 22
HASH_THREADS = 4
"""Files hashed side by side; one thread hashes about as fast as one disk reads."""

_SUMS_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_known: dict[_FileState, str] = {}


@dataclass(frozen=True, slots=True)
class _FileState:
    """What a file looked like when it was hashed; hashes are remembered by it for the life of the process."""

    path: Path
    bytes: int
    modified_ns: int


Progress = Callable[[int], None]
"""Called with the number of bytes hashed since the last call, from several threads."""


def weights_fingerprint(directory: Path | str, *, progress: Progress | None = None) -> bytes:
    """32 bytes that name the weights in `directory`. Raises CheckpointError if there are none.

    Reads every weight file that `SHA256SUMS` does not vouch for; `progress` hears of the bytes read.
    """
    hashes = weight_file_hashes(Path(directory), progress=progress)
    lines = "".join(f"{name}\0{hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).digest()


def weight_file_hashes(directory: Path, *, progress: Progress | None = None) -> dict[str, str]:
    """SHA-256 of each weight file in hexadecimal, by file name."""
    vouched = _read_sums(directory)
    paths = shard_paths(directory)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashed = pool.map(lambda path: vouched.get(path.name) or _hash_file(path, progress), paths)
        return {path.name: digest for path, digest in zip(paths, hashed, strict=True)}


def write_sums(directory: Path, hashes: Mapping[str, str]) -> Path:
    """Write `SHA256SUMS`, so that the next start need not read the weights to name them."""
    path = directory / SUMS_FILE
    path.write_text("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)), encoding="utf-8")
    return path


def _read_sums(directory: Path) -> dict[str, str]:
    """Hashes from `SHA256SUMS` for files that are not newer than it."""
    path = directory / SUMS_FILE
    try:
        text, written_ns = path.read_text(encoding="utf-8"), path.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    hashes: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _SUMS_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}, line {number}: expected a SHA-256 and a file name")
        digest, name = match.groups()
        file = directory / name
        if file.exists() and file.stat().st_mtime_ns <= written_ns:
            hashes[name] = digest.lower()
    return hashes


def _hash_file(path: Path, progress: Progress | None) -> str:
    status = path.stat()
    state = _FileState(path.resolve(), status.st_size, status.st_mtime_ns)
    known = _known.get(state)
    if known is not None:
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    _known[state] = digest.hexdigest()
    return _known[state]
