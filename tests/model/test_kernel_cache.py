"""What is compiled ahead is what steps launch: Triton finds it again in another process, and by no other name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.launches import launched, small_config


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [90, 100])
def test_what_a_process_has_compiled_another_finds(tmp_path: Path, architecture: int) -> None:
    config, cache = small_config(tmp_path), tmp_path / "cache"
    first = launched(config, cache, architecture=architecture, own=0, of=8)
    again = launched(config, cache, architecture=architecture, own=0, of=8)
    other = launched(config, cache, architecture=architecture, own=1, of=8)
    assert first["hits"]
    assert not any(hit for _, hit in first["hits"])
    assert [name for name, _ in again["hits"]] == [name for name, _ in first["hits"]]
    assert all(hit for _, hit in again["hits"])
    assert not any(hit for _, hit in other["hits"]), "shares have nothing in common"
    assert first["count"] == again["count"] == other["count"]
    assert first["too_large"] == other["too_large"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_chip_gets_the_kernels_that_are_launched_on_it(tmp_path: Path) -> None:
    config, cache = small_config(tmp_path), tmp_path / "cache"
    hopper = set[str](launched(config, cache, architecture=90, own=-1)["seen"])
    blackwell = set[str](launched(config, cache, architecture=100, own=-1)["seen"])
    assert {name.split(".")[2] for name in hopper} == {name.split(".")[2] for name in blackwell}
    assert any("gluon" in name for name in hopper)
    assert not any("gluon" in name for name in blackwell)
    assert {name.split(".")[2] for name in hopper} > {
        "sparse_attention", "packed_index_scores", "top_entries", "experts", "mhc", "rms_norm", "router", "engram_gate",
    }  # fmt: skip
