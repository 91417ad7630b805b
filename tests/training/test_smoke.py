"""The whole recipe of `make train-tiny` on a CPU, on a model and a corpus that take seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.network_world import Sequences
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS
from whalepod.model.tiny_checkpoint import shipped_tokenizer
from whalepod.training.__main__ import main

ANIMALS = ("cat", "dog", "hen", "cow", "fox", "owl")
SOUNDS = ("meows", "barks", "clucks", "moos", "yelps", "hoots")


def write_corpus(directory: Path) -> None:
    """Sentences with one thing to know in each, long and short documents."""
    generator = np.random.default_rng(7)
    tokenizer = shipped_tokenizer()
    index: dict[str, Any] = {}
    for name, documents in (("train", 1500), ("valid", 80)):
        texts: list[list[int]] = []
        for number in range(documents):
            sentences = 90 if number % 25 == 0 else int(generator.integers(1, 6))
            which = generator.integers(0, len(ANIMALS), sentences)
            text = " ".join(f"The {ANIMALS[animal]} {SOUNDS[animal]} at night." for animal in which)
            texts.append([0, *tokenizer.encode(text), 1])
        flat = np.array([token for text in texts for token in text], dtype="<u2")
        flat.tofile(directory / f"{name}.bin")
        np.ones(len(flat), dtype=np.uint8).tofile(directory / f"{name}.mask.bin")
        lengths = [len(text) for text in texts]
        index[name] = {
            "offsets": np.cumsum([0, *lengths])[:-1].tolist(),
            "kinds": ["long" if length > 100 else "short" for length in lengths],
            "prompts": [1] * documents,
        }
    (directory / "index.json").write_text(json.dumps(index), encoding="utf-8")


def figures(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipe_makes_a_checkpoint_that_knows_its_corpus_and_drafts(tmp_path: Path) -> None:
    corpus, backbone, drafter, model = (tmp_path / name for name in ("corpus", "backbone", "drafter", "model"))
    corpus.mkdir()
    write_corpus(corpus)
    shape = ["--size", "smoke", "--corpus", str(corpus), "--sequences", "8", "--tokens", "128", "--device", "cpu"]
    main(["backbone", *shape, "--out", str(backbone), "--steps", "120"])
    main(["draft", *shape, "--state", str(backbone), "--out", str(drafter), "--steps", "80", "--answer-tokens", "24"])
    main(["checkpoint", "--size", "smoke", "--state", str(backbone), "--state", str(drafter), "--out", str(model)])

    trained, drafted = figures(backbone)[-1], figures(drafter)[-1]
    assert trained["valid"] < 1.5 < math.log(6000)
    assert {"valid.long", "valid.short"} <= set(trained)
    assert drafted["accepted"] > 1.5

    network = Network.load(model)
    valid = np.fromfile(corpus / "valid.bin", dtype="<u2")[:300].astype(int).tolist()
    sequences = Sequences(network, [valid], RELEASE_FORMATS)
    sequences.step({0: len(valid)})
    losses = torch.nn.functional.cross_entropy(sequences.all_logits(0)[:-1], torch.tensor(valid[1:]))
    assert float(losses) == pytest.approx(trained["valid.long"], abs=0.4)
