"""Tokens drawn from rows of the released vocabulary; peer: the same in torch, which sorts whole rows to truncate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from whalepod.kernels.sampling import Limits, Noise, draw, draw_kept, log_sums, reference

from .measuring import Row, graph_us, relative_error, row

VOCAB = 129_280
UNSURE_SHARE = 0.02
"""Of the rows here; they would be drawn on the host."""

Drawn = tuple[Tensor, Tensor]


def rows() -> Iterator[Row]:
    for count in (48, 384, 1536):
        yield from _measure(count)


def _measure(count: int) -> Iterator[Row]:
    generator = torch.Generator("cuda").manual_seed(3)
    logits = torch.randn(count, VOCAB, device="cuda", generator=generator) * 3
    index = torch.arange(count, device="cuda")
    noise = Noise(index * 0x9E3779B97F4A7C15 % 2**62, index + 1000)
    ones, moved = torch.ones(count, device="cuda"), count * VOCAB * 4

    def drawn(name: str, ours: Callable[[], Drawn], plain: Callable[[], Drawn], *, passes: int = 1) -> Row:
        ids, unsure = ours()
        if not torch.equal(ids[~unsure], plain()[0][~unsure]) or unsure.sum() > max(1, UNSURE_SHARE * count):
            raise AssertionError(f"{name} differs: {count} rows, {int(unsure.sum())} unsure")
        us, peer_us = graph_us(ours), graph_us(plain, repeats=5)
        return row(name, f"{count} × {VOCAB}", us, bytes=passes * moved, peer="torch", peer_us=peer_us)

    yield drawn("draw", lambda: draw(logits, ones, noise), lambda: reference.draw(logits, ones, noise))
    cold = ones * 0
    yield drawn("draw, greedy", lambda: draw(logits, cold, noise), lambda: reference.draw(logits, cold, noise))
    for name, top_k, top_p in (("top-k 50", 50, 1.0), ("top-p 0.95, T = 0.5", VOCAB, 0.95)):
        limits = Limits(
            torch.full_like(index, top_k),
            torch.full((count,), top_p, dtype=torch.float64, device="cuda"),
            torch.full_like(ones, -torch.inf),
        )
        sharp = logits / 0.5 if top_p < 1 else logits
        yield drawn(
            name,
            lambda sharp=sharp, limits=limits: draw_kept(sharp, ones, noise, limits),
            lambda sharp=sharp, limits=limits: reference.draw_kept(sharp, ones, noise, limits),
            passes=2,
        )
    error = relative_error(log_sums(logits), reference.log_sums(logits))
    us, peer_us = graph_us(lambda: log_sums(logits)), graph_us(lambda: reference.log_sums(logits), repeats=5)
    yield row("log of sums", f"{count} × {VOCAB}", us, bytes=moved, error=error, peer="torch", peer_us=peer_us)
