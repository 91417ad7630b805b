"""What runs over whole rows between the products, each in one pass; peer: the steps in torch, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

from .measuring import Row, graph_us, in_graph, row

D, PAIRS, HEADS, HEAD_WIDTH, COLUMNS, EXPERTS = 5120, 32, 32, 128, 2304, 384


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    row_bytes: int
    """Fewest bytes that a row moves."""
    make: Callable[[int, int], tuple[Callable[[], object], Callable[[], object]]]
    """(rows, seed) -> the kernel and the same in torch, both on tensors of their own."""


def rows() -> Iterator[Row]:
    for count in (48, 1536, 4096):
        for case in CASES:
            moved = count * case.row_bytes
            ours, plain = case.make(count, 0)
            yield row(
                case.kernel,
                f"{count}",
                graph_us(ours),
                bytes=moved,
                peer="torch",
                peer_us=graph_us(plain),
                in_graph=in_graph(lambda seed, case=case, count=count: case.make(count, seed)[0], bytes=moved),
            )


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def _norm(count: int, seed: int) -> tuple[Callable[[], object], Callable[[], object]]:
    x, weight = _draw(count, D, seed=seed), _draw(D, seed=seed)
    return lambda: rms_norm(x, weight, eps=1e-20), lambda: norm_reference.rms_norm(x, weight, eps=1e-20)


def _norm_codes(count: int, seed: int) -> tuple[Callable[[], object], Callable[[], object]]:
    x, weight = _draw(count, D, seed=seed), _draw(D, seed=seed)
    return (
        lambda: rms_norm_fp8(x, weight, eps=1e-20),
        lambda: FP8_BLOCK32.encode(norm_reference.rms_norm(x, weight, eps=1e-20)),
    )


def _round_trip(count: int, seed: int) -> tuple[Callable[[], object], Callable[[], object]]:
    x = _draw(count, D, seed=seed)
    return lambda: round_trip(x, FP8_BLOCK32), lambda: FP8_BLOCK32.round_trip(x)


def _index_queries(count: int, seed: int) -> tuple[Callable[[], object], Callable[[], object]]:
    queries = _draw(count, HEADS, HEAD_WIDTH, seed=seed)
    angles = torch.rand(count, PAIRS, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) * 6
    cos, sin = angles.cos(), angles.sin()
    return lambda: index_queries(queries, cos, sin), lambda: queries_reference.index_queries(queries, cos, sin)


def _engram_gate(count: int, seed: int) -> tuple[Callable[[], object], Callable[[], object]]:
    streams, projected, gate = _draw(count, 4, D, seed=seed), _draw(count, 5 * D, seed=seed), _draw(4, D, seed=seed)
    return (
        lambda: let_in(streams, projected, gate, None, eps=1e-20),
        lambda: gate_reference.let_in(streams, projected, gate, None, eps=1e-20),
    )


def _swiglu(count: int, seed: int) -> tuple[Callable[[], object], Callable[[], object]]:
    gates = _draw(count, 2 * COLUMNS, seed=seed)
    return (
        lambda: swiglu(gates, limit=10.0, round_trip=True),
        lambda: FP8_BLOCK32.round_trip(torch.nn.functional.silu(gates[:, :COLUMNS]) * gates[:, COLUMNS:]),
    )


def _choice(count: int, seed: int) -> tuple[Callable[[], object], Callable[[], object]]:
    logits, bias = _draw(count, EXPERTS, seed=seed).float(), _draw(EXPERTS, seed=seed).float()
    return lambda: router_kernel.choose(logits, bias, chosen=6, factor=1.5), lambda: _plain_choice(logits, bias)


def _plain_choice(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = (scores + bias).topk(6, dim=1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(dim=1, keepdim=True) * 1.5


CASES = (
    Case("RMSNorm", 4 * D, _norm),
    Case("RMSNorm + FP8 codes", 5 * D + D // 32, _norm_codes),
    Case("FP8 round trip", 4 * D, _round_trip),
    Case("index queries", HEADS * HEAD_WIDTH * 4, _index_queries),
    Case("Engram gate", D * 2 * (4 + 5 + 4), _engram_gate),
    Case("SwiGLU + FP8 round trip", 3 * COLUMNS * 2, _swiglu),
    Case("choice of experts", EXPERTS * 4 + 6 * 12, _choice),
)
