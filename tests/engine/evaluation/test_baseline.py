"""The n-gram baseline is recorded with what it was computed from, and taken for no other text."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest

from whalepod.core.errors import ConfigError
from whalepod.engine.evaluation.baseline import TRAINING_FILE, Baseline, read_training_tokens
from whalepod.engine.evaluation.held_out import Document
from whalepod.engine.evaluation.kneser_ney import KneserNey

TRAINING = np.array([0, 3, 4, 5, 3, 4, 1, 0, 3, 5, 1, 0, 5, 4, 4, 1] * 3, "<u2")
DOCUMENTS = [Document("a", [0, 3, 4, 1], [1, 2, 3], 10), Document("b", [0, 5, 3, 5, 1], [2, 4], 4)]


def computed(held_out_sha256: str = "x") -> Baseline:
    return Baseline.computed(TRAINING, DOCUMENTS, held_out_sha256=held_out_sha256, vocab_size=8, bos_id=0)


def test_bits_are_those_of_the_scored_tokens() -> None:
    baseline = computed()
    model = KneserNey.trained(TRAINING, vocab_size=8, bos_id=0)
    scores = model.log_probabilities(np.array(DOCUMENTS[1].ids))
    assert baseline.bits[1] == pytest.approx(-(scores[2] + scores[4]) / math.log(2))
    assert baseline.bits_per_byte({1: DOCUMENTS[1]}) == pytest.approx(baseline.bits[1] / 4)
    both = baseline.bits_per_byte(dict(enumerate(DOCUMENTS)))
    assert both == pytest.approx(sum(baseline.bits) / 14)


def test_what_is_recorded_is_read_for_the_same_text_only(tmp_path: Path) -> None:
    path, baseline = tmp_path / "baseline.json", computed()
    assert Baseline.read(path, held_out_sha256="x") is None
    baseline.write(path)
    found = Baseline.read(path, held_out_sha256="x")
    assert found is not None
    assert found.recorded
    assert not baseline.recorded
    assert found.bits == pytest.approx(baseline.bits, abs=1e-3)
    assert found.training_sha256 == hashlib.sha256(TRAINING.tobytes()).hexdigest()
    assert found.training_tokens == len(TRAINING)
    assert Baseline.read(path, held_out_sha256="y") is None
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no recorded baseline"):
        Baseline.read(path, held_out_sha256="x")


def test_training_tokens_are_read_from_a_corpus_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_training_tokens(tmp_path)
    TRAINING.tofile(tmp_path / TRAINING_FILE)
    assert read_training_tokens(tmp_path).tolist() == TRAINING.tolist()
    with pytest.raises(ConfigError, match="not of this model"):
        Baseline.computed(TRAINING, DOCUMENTS, held_out_sha256="x", vocab_size=4, bos_id=0)
