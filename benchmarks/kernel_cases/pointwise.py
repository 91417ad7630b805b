"""What runs over whole rows between the products, each in one pass; peer: the steps in torch, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from whalepod.kernels.engram_gate import let_in
from whalepod.kernels.engram_gate import reference as gate_reference
from whalepod.kernels.experts.triton_kernel import swiglu
from whalepod.kernels.index_queries import index_queries
from whalepod.kernels.index_queries import reference as queries_reference
from whalepod.kernels.quantise import FP8_BLOCK32, round_trip
from whalepod.kernels.rms_norm import reference as norm_reference
from whalepod.kernels.rms_norm import rms_norm, rms_norm_fp8
from whalepod.kernels.router import triton_kernel as router_kernel

from .measuring import Row, graph_us, row

D, PAIRS, EXPERTS = 5120, 32, 384


def rows() -> Iterator[Row]:
    for count in (48, 1536, 4096):
        yield from _measure(count)


def _measure(count: int) -> Iterator[Row]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()

    def measured(name: str, moved: int, call: Callable[[], object], plain: Callable[[], object]) -> Row:
        return row(name, f"{count}", graph_us(call), bytes=moved, peer="torch", peer_us=graph_us(plain))

    x, weight = draw(count, D), draw(D)
    angles = torch.rand(count, PAIRS, device="cuda", generator=torch.Generator("cuda").manual_seed(2)) * 6
    cos, sin = angles.cos(), angles.sin()
    yield measured(
        "RMSNorm", 4 * count * D, lambda: rms_norm(x, weight, eps=1e-20),
        lambda: norm_reference.rms_norm(x, weight, eps=1e-20),
    )  # fmt: skip
    yield measured(
        "RMSNorm + FP8 codes", 5 * count * D + count * D // 32, lambda: rms_norm_fp8(x, weight, eps=1e-20),
        lambda: FP8_BLOCK32.encode(norm_reference.rms_norm(x, weight, eps=1e-20)),
    )  # fmt: skip
    yield measured(
        "FP8 round trip", 4 * count * D, lambda: round_trip(x, FP8_BLOCK32), lambda: FP8_BLOCK32.round_trip(x)
    )
    scored = draw(count, 32, 128)
    yield measured(
        "index queries", count * 32 * 128 * 4, lambda: index_queries(scored, cos, sin),
        lambda: queries_reference.index_queries(scored, cos, sin),
    )  # fmt: skip
    streams, projected, gate = draw(count, 4, D), draw(count, 5 * D), draw(4, D)
    yield measured(
        "Engram gate", count * D * 2 * (4 + 5 + 4), lambda: let_in(streams, projected, gate, None, eps=1e-20),
        lambda: gate_reference.let_in(streams, projected, gate, None, eps=1e-20),
    )  # fmt: skip
    gates = draw(count, 2 * 2304)
    yield measured(
        "SwiGLU + FP8 round trip", count * 3 * 2304 * 2, lambda: swiglu(gates, limit=10.0, round_trip=True),
        lambda: FP8_BLOCK32.round_trip(torch.nn.functional.silu(gates[:, :2304]) * gates[:, 2304:]),
    )  # fmt: skip
    logits, bias = draw(count, EXPERTS).float(), draw(EXPERTS).float()
    yield measured(
        "choice of experts", count * (EXPERTS * 4 + 6 * 12),
        lambda: router_kernel.choose(logits, bias, chosen=6, factor=1.5), lambda: _plain_choice(logits, bias),
    )  # fmt: skip


def _plain_choice(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = (scores + bias).topk(6, dim=1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(dim=1, keepdim=True) * 1.5
