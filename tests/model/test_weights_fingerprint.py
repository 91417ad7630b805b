"""The name of the weights: other weights, another name; known hashes are used only while they can be trusted."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from whalepod.core.errors import CheckpointError
from whalepod.model.weights_fingerprint import weight_file_hashes, weights_fingerprint, write_sums

NAME = "model.safetensors"


def checkpoint(directory: Path, content: bytes = b"weights", *, modified_s: int = 1000) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / NAME).write_bytes(content)
    os.utime(directory / NAME, (modified_s, modified_s))
    return directory


def test_equal_weights_share_a_name_wherever_they_lie(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert weights_fingerprint(first) == weights_fingerprint(second)
    assert len(weights_fingerprint(first)) == 32


def test_one_changed_byte_changes_the_name_even_in_the_same_process(tmp_path: Path) -> None:
    before = weights_fingerprint(checkpoint(tmp_path / "a", b"weights", modified_s=1000))
    assert weights_fingerprint(checkpoint(tmp_path / "a", b"weighty", modified_s=1001)) != before


def test_sums_beside_the_weights_spare_reading_them(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "a")
    name = weights_fingerprint(directory)
    write_sums(directory, weight_file_hashes(directory))
    reads: list[int] = []
    other = tmp_path / "moved"
    directory.rename(other)
    assert weights_fingerprint(other, progress=reads.append) == name
    assert reads == []


def test_sums_have_the_format_of_sha256sum(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "a")
    path = write_sums(directory, weight_file_hashes(directory))
    assert path.read_text() == f"{hashlib.sha256(b'weights').hexdigest()}  {NAME}\n"


def test_weights_that_are_newer_than_the_sums_are_read_again(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "a")
    sums = write_sums(directory, weight_file_hashes(directory))
    os.utime(sums, (2000, 2000))
    checkpoint(directory, b"replaced", modified_s=3000)
    reads: list[int] = []
    assert weights_fingerprint(directory, progress=reads.append) == weights_fingerprint(
        checkpoint(tmp_path / "b", b"replaced")
    )
    assert sum(reads) == len(b"replaced")


def test_unreadable_sums_are_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "a")
    (directory / "SHA256SUMS").write_text("no hash\n")
    with pytest.raises(CheckpointError, match="line 1"):
        weights_fingerprint(directory)


def test_a_directory_without_weights_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        weights_fingerprint(tmp_path)
