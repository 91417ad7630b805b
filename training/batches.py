"""Batches of a corpus: whole documents, laid out one after the other in sequences of one length.

A corpus directory holds, for `train` and `valid`: `NAME.bin` (uint16 token ids, little-endian, documents one after the
other), `NAME.mask.bin` (uint8, 1 where a token is to be predicted) and in `index.json` where documents start and of
which kind each is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.core.errors import ConfigError
from whalepod.model.rows import runs

Ints = NDArray[np.int64]
INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Corpus:
    ids: NDArray[np.uint16]
    """[tokens]"""
    targets: NDArray[np.bool_]
    """[tokens]: what is to be predicted."""
    starts: Ints
    """[documents + 1]: where each document starts, and the end."""
    kinds: Ints
    """[documents]: index of the document's kind in `kind_names`."""
    kind_names: tuple[str, ...]
    prompts: Ints
    """[documents]: tokens of each that are the client's; 1 where nothing was asked."""

    @classmethod
    def read(cls, directory: Path, name: str) -> Self:
        """`train` or `valid` of a corpus directory. Raises ConfigError if its files contradict each other."""
        index: Mapping[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        part = index[name]
        ids = np.fromfile(directory / f"{name}.bin", dtype="<u2")
        targets = np.fromfile(directory / f"{name}.mask.bin", dtype=np.uint8).astype(bool)
        starts = np.append(np.array(part["offsets"], dtype=np.int64), len(ids))
        names = tuple(sorted(set(part["kinds"])))
        numbers = {kind: number for number, kind in enumerate(names)}
        kinds = np.array([numbers[kind] for kind in part["kinds"]], dtype=np.int64)
        prompts = np.array(part["prompts"], dtype=np.int64)
        documents = len(starts) - 1
        if len(targets) != len(ids) or {len(kinds), len(prompts)} != {documents} or (np.diff(starts) < 0).any():
            raise ConfigError(f"{directory}: {name}.bin, its mask and {INDEX} do not fit together")
        return cls(ids, targets, starts, kinds, names, prompts)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)


class Batch(NamedTuple):
    """Sequences [B, T] on a device."""

    ids: Tensor
    documents: Tensor
    targets: Tensor
    """bool: tokens that are to be predicted from those before them."""
    kinds: Tensor
    """Kind of each token's document."""

    def labels(self) -> tuple[Tensor, Tensor]:
        """What each row predicts [B, T], and whether it counts."""
        labels = torch.cat((self.ids[:, 1:], self.ids[:, :1]), dim=1)
        counts = self.targets[:, 1:] & (self.documents[:, 1:] == self.documents[:, :-1])
        return labels, torch.cat((counts, torch.zeros_like(counts[:, :1])), dim=1)


class Layout:
    """Some documents of a corpus in sequences of `tokens` tokens each. A document starts at a multiple of `align`, so
    that its groups and blocks of entries are those of a request; one that is cut goes on in another sequence as a
    document of its own. The last tokens, less than a sequence, are left out."""

    def __init__(self, corpus: Corpus, documents: Ints, *, tokens: int, align: int, padding: int) -> None:
        lengths = corpus.lengths[documents]
        room = -(-lengths // align) * align
        sequences = int(room.sum()) // tokens
        starts = np.cumsum(room) - room
        document, place = runs(starts, starts + lengths)
        source = place - starts[document] + corpus.starts[documents][document]
        total = int(room.sum())
        self.ids = np.full(total, padding, dtype=np.int32)
        self.ids[place] = corpus.ids[source]
        self.targets = np.zeros(total, dtype=bool)
        self.targets[place] = corpus.targets[source]
        self.documents = np.repeat(np.arange(len(documents), dtype=np.int32), room)
        self.kinds = np.repeat(corpus.kinds[documents].astype(np.int32), room)
        self.shape = (sequences, tokens)

    def __len__(self) -> int:
        """Sequences."""
        return self.shape[0]

    def to(self, device: torch.device) -> Batch:
        """All sequences at once."""
        count = self.shape[0] * self.shape[1]

        def moved(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values[:count].reshape(self.shape)).to(device)

        return Batch(
            moved(self.ids).long(), moved(self.documents).long(), moved(self.targets), moved(self.kinds).long()
        )

    def padded_batches(self, sequences: int, device: torch.device, *, most: int) -> Iterator[Batch]:
        """The first `most` batches in order; the last is filled up with sequences whose tokens are no targets."""
        whole = self.to(device)
        for first in range(0, min(len(self), most * sequences), sequences):
            rows = torch.arange(first, first + sequences, device=device)
            batch = Batch(*(part[rows % len(self)] for part in whole))
            yield batch._replace(targets=batch.targets & (rows < len(self))[:, None])


@dataclass(frozen=True, slots=True)
class Shape:
    sequences: int
    tokens: int


class Batches:
    """Endless batches of one shape from some documents, in a new order every epoch."""

    def __init__(self, corpus: Corpus, documents: Ints, shape: Shape, *, align: int, padding: int, seed: int) -> None:
        self.corpus, self.documents, self.shape = corpus, documents, shape
        self.align, self.padding, self.seed = align, padding, seed

    def batches(self, device: torch.device, *, skip: int = 0) -> Iterator[Batch]:
        """Raises ConfigError if the documents do not fill one batch."""
        given, epoch = 0, 0
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.documents)
            layout = Layout(self.corpus, order, tokens=self.shape.tokens, align=self.align, padding=self.padding)
            count = len(layout) // self.shape.sequences
            if count == 0:
                raise ConfigError(f"the documents do not fill {self.shape.sequences} × {self.shape.tokens} tokens")
            epoch += 1
            if given + count <= skip:
                given += count
                continue
            # Cut documents lie beside each other; a batch takes sequences from all over the epoch.
            rows = np.random.default_rng((self.seed, epoch, 1)).permutation(len(layout))
            whole = layout.to(device)
            for number in range(count):
                given += 1
                if given > skip:
                    some = rows[number * self.shape.sequences : (number + 1) * self.shape.sequences]
                    index = torch.from_numpy(some).to(device)
                    yield Batch(*(part[index] for part in whole))


def by_length(corpus: Corpus, tokens: int) -> tuple[Ints, Ints]:
    """Documents of at most `tokens` tokens, and longer ones."""
    long = corpus.lengths > tokens
    return np.flatnonzero(~long), np.flatnonzero(long)
