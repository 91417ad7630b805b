"""Hyper-connections of 4 streams of 5,120 channels; peers: DeepGEMM's projection alone, torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from whalepod.kernels.mhc import Mixes, reference
from whalepod.kernels.mhc import triton_kernel as kernel

from .measuring import Row, graph_us, in_graph, relative_error, row

S, D, OUT = 4, 5120, 24
SETTINGS: dict[str, Any] = {"rms_eps": 1e-20, "eps": 1e-6, "iterations": 20}


def rows() -> Iterator[Row]:
    for count in (48, 1536, 4096):
        yield _predict(count)
        yield _collapse(count)
        yield _expand(count)


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def _predict(count: int) -> Row:
    def given(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams, fn = _draw(count, S, D, seed=seed).bfloat16(), _draw(OUT, S * D, seed=seed) * 0.02
        return streams, fn, _draw(OUT, seed=seed).abs(), _draw(OUT, seed=seed + 1)

    def ready(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return streams, kernel.split_weights(fn), scale, base

    def make(seed: int) -> Callable[[], object]:
        own = ready(*given(seed))
        return lambda: kernel.predict_mixes(*own, **SETTINGS)

    one = given(0)
    expected = reference.predict_mixes(*(x.double() for x in one), **SETTINGS)
    mixes = kernel.predict_mixes(*ready(*one), **SETTINGS)
    moved = count * S * D * 2 + OUT * S * D * 4
    return row(
        "mhc predict",
        f"{count}",
        graph_us(make(0)),
        bytes=moved,
        flops=2 * count * OUT * S * D,
        error=max(relative_error(out, wanted) for out, wanted in zip(mixes, expected, strict=True)),
        peer="DeepGEMM projection alone",
        peer_us=_deep_gemm_us(count),
        in_graph=in_graph(make, bytes=moved),
    )


def _collapse(count: int) -> Row:
    def given(seed: int) -> tuple[Tensor, Tensor]:
        return _draw(count, S, D, seed=seed).bfloat16(), _draw(count, S, seed=seed).sigmoid()

    def make(seed: int) -> Callable[[], object]:
        own = given(seed)
        return lambda: kernel.collapse(*own)

    streams, pre = given(0)
    moved = count * (S + 1) * D * 2
    return row(
        "mhc collapse",
        f"{count}",
        graph_us(make(0)),
        bytes=moved,
        error=relative_error(kernel.collapse(streams, pre), reference.collapse(streams.float(), pre)),
        peer="torch",
        peer_us=graph_us(lambda: reference.collapse(streams, pre)),
        in_graph=in_graph(make, bytes=moved),
    )


def _expand(count: int) -> Row:
    def given(seed: int) -> tuple[Tensor, Tensor, Mixes]:
        y, streams = _draw(count, D, seed=seed).bfloat16(), _draw(count, S, D, seed=seed).bfloat16()
        pre, post = (_draw(count, S, seed=seed + part).sigmoid() for part in range(2))
        return y, streams, Mixes(pre, post, _draw(count, S, S, seed=seed).softmax(dim=1))

    def make(seed: int) -> Callable[[], object]:
        y, streams, mixes = given(seed)
        return lambda: kernel.expand(y, streams, mixes.post, mixes.comb)

    y, streams, mixes = given(0)
    out = kernel.expand(y, streams, mixes.post, mixes.comb)
    moved = count * (2 * S + 1) * D * 2
    return row(
        "mhc expand",
        f"{count}",
        graph_us(make(0)),
        bytes=moved,
        error=relative_error(out, reference.expand(y.float(), streams.float(), mixes)),
        peer="torch",
        peer_us=graph_us(lambda: reference.expand(y, streams, mixes)),
        in_graph=in_graph(make, bytes=moved),
    )


def _deep_gemm_us(count: int) -> float | None:
    try:
        import deep_gemm  # pyright: ignore[reportMissingImports]

        splits = 16
        generator = torch.Generator("cuda").manual_seed(5)
        x = torch.randn(count, S * D, device="cuda", dtype=torch.bfloat16, generator=generator)
        fn = torch.randn(OUT, S * D, device="cuda", generator=generator)
        out = torch.empty(splits, count, OUT, device="cuda")
        squares = torch.empty(splits, count, device="cuda")
        return graph_us(lambda: deep_gemm.tf32_hc_prenorm_gemm(x, fn, out, squares, splits))
    except (ImportError, RuntimeError, AssertionError, TypeError, AttributeError) as problem:
        print(f"DeepGEMM: {type(problem).__name__} {str(problem)[:300]}")
        return None
