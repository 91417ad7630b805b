"""What the backbone itself says: many sequences, a token each in every step, with caches.

A drafter meets no text but the backbone's own, so that is what it learns from: `answered` puts it into the place of a
corpus' answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import wide_dtype

from . import looking
from .backbone import Backbone, Options, Pass
from .batches import Corpus, Ints
from .compiling import plain
from .parameters import Layer

ENTRIES_STEP = 64
"""Entries are looked at in multiples of so many."""


@dataclass(frozen=True, slots=True)
class AnswerRecipe:
    """How a corpus' prompts are answered."""

    temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 1.0)
    """Documents take them in turn."""
    prompt_max: int = 384
    """A document with a longer prompt keeps its own text."""
    opening: int = 8
    """Of a document that is no answer so many tokens are given, of a short one half."""
    tokens_max: int = 256
    """Longest answer; what goes on is cut there."""
    sequences: int = 16_384
    """Most at once."""
    seed: int = 0


class Stepping(Backbone):
    """The backbone on one row of every sequence at a time, with caches of the rows before; no gradients."""

    def __init__(self, backbone: Backbone, *, sequences: int, tokens: int) -> None:
        """Room for `tokens` places in each of `sequences`."""
        self.__dict__.update(backbone.__dict__)
        config, device = backbone.config, backbone.token_map.device
        self.place = 0

        def room(rows: int, width: int) -> Tensor:
            return torch.zeros(sequences, rows, width, dtype=self.dtype, device=device)

        self._ids = torch.zeros(sequences, 0, dtype=torch.int64, device=device)
        self._windows = [room(config.window, config.head_dim) for _ in range(config.num_hidden_layers)]
        self._pairs = {layer: room(config.ratio(layer), config.hidden_size) for layer in config.kv_source_layer_ids}
        self._entries = {
            layer: (room(tokens, config.head_dim), room(tokens, config.index_head_dim))
            for layer in config.kv_source_layer_ids
        }

    @torch.no_grad()
    def step(self, tensors: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        """ids [B] of the next row of each sequence -> its logits [B, vocab], at least float32."""
        config = self.config
        self._ids = torch.cat((self._ids, ids[:, None]), dim=1)[:, -config.engram_max_ngram_size :]
        documents = torch.zeros_like(self._ids)
        memories = {
            layer: memory.unflatten(0, self._ids.shape)[:, -1]
            for layer, memory in self._memories(tensors, self._ids, documents).items()
        }
        embedded = functional.embedding(ids, tensors["embed.weight"]).to(self.dtype)
        pre = torch.zeros(len(ids), config.hc_mult, dtype=wide_dtype(self.dtype), device=ids.device)
        pre[:, 0] = 1
        places = torch.full((len(ids), 1), self.place, device=ids.device)
        run = Pass(
            ids[:, None], documents[:, -1:], embedded.unsqueeze(1).repeat(1, config.hc_mult, 1), pre, Options(), places
        )
        run.first = self.place
        run.angles = {compressed: self.angles(places, compressed=compressed) for compressed in (False, True)}
        for layer in range(config.num_hidden_layers):
            self._layer(Layer(tensors, f"layers.{layer}."), layer, run, memories.get(layer))
        self.place += 1
        return self.logits(tensors, run)[:, 0]

    def _look(self, number: int, queries: Tensor, window: Tensor, sink: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        ring, reach = self._windows[number], self.config.window
        slots = torch.arange(reach, device=ring.device)
        near = (slots < self.place) & (slots != self.place % reach)
        context, seen = ring, near.expand(len(ring), -1)
        if self.config.ratio(number) > 0:
            assert run.entries is not None and run.chosen is not None
            context = torch.cat((context, run.entries), dim=1)
            seen = torch.cat((seen, run.chosen[:, 0]), dim=1)
        looked = looking.look_at_rows(queries, context, window, seen, sink)
        ring[:, self.place % reach] = window[:, 0]
        return looked, sink  # only the indexers' training needs denominators

    def _write_entries(self, weights: Layer, number: int, x: Tensor, run: Pass) -> None:
        ratio, pair = self.config.ratio(number), self._pairs[number]
        entries, keys = self._entries[number]
        pair[:, self.place % ratio] = x[:, 0]
        closed = (self.place + 1) // ratio
        if (self.place + 1) % ratio == 0:
            places = torch.full_like(run.places, self.place + 1 - ratio)
            cos, sin = self.angles(places, compressed=True)
            entry, key = self._entries_of(weights, pair, cos, sin, ratio)
            entries[:, closed - 1], keys[:, closed - 1] = entry[:, 0], key[:, 0]
        some = min(-(-closed // ENTRIES_STEP) * ENTRIES_STEP, entries.shape[1])
        run.entries, run.keys = entries[:, :some], keys[:, :some]
        run.visible = (torch.arange(some, device=x.device) < closed).expand(len(x), 1, -1)


class Prompts(NamedTuple):
    """Beginnings of sequences [B]: ids [B, longest] int64, how many of them count, and how each is to go on."""

    ids: Tensor
    lengths: Tensor
    temperatures: Tensor
    """0: the most likely token."""


@torch.no_grad()
def answers(
    backbone: Backbone, tensors: Mapping[str, Tensor], prompts: Prompts, *, tokens_max: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """-> ids [B, longest + tokens_max], prompt and answer, and how many of them count [B]. An answer ends with the end
    token, or after `tokens_max`."""
    count, longest = prompts.ids.shape
    room = longest + tokens_max
    ids = functional.pad(prompts.ids, (0, tokens_max))
    ends = prompts.lengths + tokens_max
    stepping = Stepping(backbone, sequences=count, tokens=room)
    with plain():
        for place in range(room - 1):
            logits = stepping.step(tensors, ids[:, place])
            said = _choose(logits, prompts.temperatures, generator)
            new = (place + 1 >= prompts.lengths) & (place + 1 < ends)
            ids[:, place + 1] = torch.where(new, said, ids[:, place + 1])
            ends = torch.where(new & (said == backbone.config.eos_token_id), place + 2, ends)
            if place % ENTRIES_STEP == 0 and bool((ends <= place + 2).all()):
                break
    return ids, ends


def _choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """logits [B, vocab] -> tokens [B], drawn by Gumbel's noise."""
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(1e-20, 1 - 2.0**-24)
    return (logits - temperatures[:, None] * torch.log(-torch.log(uniform))).argmax(dim=-1)


def answered(
    corpus: Corpus,
    backbone: Backbone,
    tensors: Mapping[str, Tensor],
    recipe: AnswerRecipe,
    *,
    report: Callable[[int, int], None] | None = None,
) -> Corpus:
    """`corpus` with what the backbone says in the place of its answers, which alone are targets; documents with long
    prompts as they are. `report` is told documents done and documents in all."""
    device = backbone.token_map.device
    given = _given(corpus, recipe)
    short = np.flatnonzero(given <= recipe.prompt_max)
    temperatures = np.array(recipe.temperatures, dtype=np.float32)[np.arange(len(given)) % len(recipe.temperatures)]
    generator = torch.Generator(device).manual_seed(recipe.seed)
    found: dict[int, NDArray[np.uint16]] = {}
    for documents in _together(short, given, recipe.sequences):
        prompts = Prompts(
            _beginnings(corpus, documents, given).to(device),
            torch.from_numpy(given[documents]).to(device),
            torch.from_numpy(temperatures[documents]).to(device),
        )
        ids, ends = answers(backbone, tensors, prompts, tokens_max=recipe.tokens_max, generator=generator)
        rows, lengths = ids.to(torch.int32).cpu().numpy().astype(np.uint16), ends.tolist()
        found |= {int(document): row[:length] for document, row, length in zip(documents, rows, lengths, strict=True)}
        if report is not None:
            report(len(found), len(short))
    return _replaced(corpus, found, given)


def _given(corpus: Corpus, recipe: AnswerRecipe) -> Ints:
    """How many tokens of each document are not the backbone's."""
    opening = np.minimum(recipe.opening, corpus.lengths // 2)
    return np.maximum(np.where(corpus.prompts > 1, corpus.prompts, opening), 1)


def _together(documents: Ints, given: Ints, most: int) -> Iterator[Ints]:
    """Documents with prompts of about the same length, at most `most` at once."""
    ordered = documents[np.argsort(given[documents], kind="stable")]
    for first in range(0, len(ordered), most):
        yield ordered[first : first + most]


def _beginnings(corpus: Corpus, documents: Ints, given: Ints) -> Tensor:
    """[documents, longest] int64, zeros after the end of each."""
    place = np.arange(given[documents].max())
    source = np.minimum(corpus.starts[documents][:, None] + place, len(corpus.ids) - 1)
    return torch.from_numpy(np.where(place < given[documents][:, None], corpus.ids[source], 0).astype(np.int64))


def _replaced(corpus: Corpus, found: Mapping[int, NDArray[np.uint16]], given: Ints) -> Corpus:
    ids: list[NDArray[np.uint16]] = []
    targets: list[NDArray[np.bool_]] = []
    for document, (start, end) in enumerate(zip(corpus.starts, corpus.starts[1:], strict=False)):
        own = found.get(document)
        ids.append(corpus.ids[start:end] if own is None else own)
        targets.append(corpus.targets[start:end] if own is None else np.arange(len(own)) >= given[document])
    starts = np.cumsum([0, *map(len, ids)])
    return replace(corpus, ids=np.concatenate(ids), targets=np.concatenate(targets), starts=starts)
