"""Documents are laid out whole, aligned and once an epoch; a batch asks for nothing that its text does not say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from whalepod.core.errors import ConfigError
from whalepod.training.batches import Batches, Corpus, Layout, Shape, by_length

CPU = torch.device("cpu")
LENGTHS = (5, 20, 9, 3, 40, 8, 12, 6)


def corpus() -> Corpus:
    starts = np.concatenate(([0], np.cumsum(LENGTHS)))
    ids = np.arange(100, 100 + starts[-1]).astype(np.uint16)
    return Corpus(
        ids, ids % 3 != 0, starts, np.arange(len(LENGTHS)) % 2, ("even", "odd"), np.ones(len(LENGTHS), dtype=np.int64)
    )


def layout(documents: list[int], tokens: int = 16) -> Layout:
    return Layout(corpus(), np.array(documents), tokens=tokens, align=8, padding=2)


def test_documents_start_at_multiples_and_keep_their_tokens() -> None:
    batch = layout([0, 3, 5, 6]).to(CPU)
    assert batch.ids[0].tolist() == [100, 101, 102, 103, 104, 2, 2, 2, 134, 135, 136, 2, 2, 2, 2, 2]
    assert batch.documents[0].tolist() == [0] * 8 + [1] * 8
    assert batch.kinds[0].tolist() == [0] * 8 + [1] * 8
    assert not batch.targets[0][[5, 6, 7]].any()
    assert batch.targets[0][:5].tolist() == [token % 3 != 0 for token in range(100, 105)]


def test_labels_are_the_next_tokens_of_the_same_document() -> None:
    batch = layout([0, 3, 5, 6]).to(CPU)
    labels, counts = batch.labels()
    assert labels[0, :4].tolist() == [101, 102, 103, 104]
    assert (
        counts[0].tolist()
        == [token % 3 != 0 for token in range(101, 105)]
        + [False] * 4
        + [token % 3 != 0 for token in (135, 136)]
        + [False] * 6
    )


def test_an_epoch_holds_every_sequence_once_and_the_next_has_another_order() -> None:
    documents = np.arange(len(LENGTHS))
    batches = Batches(corpus(), documents, Shape(2, 16), align=8, padding=2, seed=1).batches(CPU)
    per_epoch = len(layout(list(range(len(LENGTHS))))) // 2
    epochs = [[next(batches) for _ in range(per_epoch)] for _ in range(2)]
    told = [sorted(int(token) for batch in epoch for token in batch.ids.flatten() if token != 2) for epoch in epochs]
    assert len(set(told[0])) == len(told[0])
    assert [batch.ids.tolist() for batch in epochs[0]] != [batch.ids.tolist() for batch in epochs[1]]


def test_going_on_skips_what_was_given() -> None:
    made = Batches(corpus(), np.arange(len(LENGTHS)), Shape(2, 16), align=8, padding=2, seed=1)
    straight = made.batches(CPU)
    given = [next(straight) for _ in range(9)]
    again = next(made.batches(CPU, skip=7))
    assert torch.equal(again.ids, given[7].ids)


def test_the_last_padded_batch_repeats_sequences_that_ask_for_nothing() -> None:
    whole = layout([1, 4, 6])
    batches = list(whole.padded_batches(4, CPU, most=9))
    assert [tuple(batch.ids.shape) for batch in batches] == [(4, 16)] * 2
    assert len(whole) == 5
    assert not batches[1].targets[1:].any()
    assert batches[1].targets[0].any()


def test_long_documents_are_told_apart() -> None:
    short, long = by_length(corpus(), 12)
    assert long.tolist() == [1, 4]
    assert sorted([*short, *long]) == list(range(len(LENGTHS)))


def test_a_corpus_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    np.array([5, 6, 7, 8], dtype="<u2").tofile(tmp_path / "train.bin")
    np.array([0, 1, 1, 0], dtype=np.uint8).tofile(tmp_path / "train.mask.bin")
    index = {"train": {"offsets": [0, 3], "kinds": ["story", "chat"], "prompts": [1, 1]}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    read = Corpus.read(tmp_path, "train")
    assert read.lengths.tolist() == [3, 1]
    assert [read.kind_names[kind] for kind in read.kinds] == ["story", "chat"]
    np.array([1], dtype=np.uint8).tofile(tmp_path / "train.mask.bin")
    with pytest.raises(ConfigError, match="do not fit together"):
        Corpus.read(tmp_path, "train")


def test_too_few_documents_are_refused() -> None:
    batches = Batches(corpus(), np.array([3]), Shape(2, 16), align=8, padding=2, seed=1)
    with pytest.raises(ConfigError, match="do not fill"):
        next(batches.batches(CPU))
