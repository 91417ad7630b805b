"""Hyper-connections of 4 streams of 5,120 channels; peers: DeepGEMM's projection alone, torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whalepod.kernels.mhc import Mixes, reference
from whalepod.kernels.mhc import triton_kernel as kernel

from .measuring import Row, graph_us, relative_error, row

S, D, OUT = 4, 5120, 24
RMS_EPS, EPS, ITERATIONS = 1e-20, 1e-6, 20


def rows() -> Iterator[Row]:
    for count in (48, 1536, 4096):
        yield from _measure(count)


def _measure(count: int) -> Iterator[Row]:
    generator = torch.Generator("cuda").manual_seed(3)
    streams = torch.randn(count, S, D, device="cuda", generator=generator).bfloat16()
    y = torch.randn(count, D, device="cuda", generator=generator).bfloat16()
    fn = torch.randn(OUT, S * D, device="cuda", generator=generator) * 0.02
    scale, base = (
        torch.rand(OUT, device="cuda", generator=generator),
        torch.randn(OUT, device="cuda", generator=generator),
    )
    given = (streams, fn, scale, base)
    expected = reference.predict_mixes(
        streams.double(), fn.double(), scale.double(), base.double(), rms_eps=RMS_EPS, eps=EPS, iterations=ITERATIONS
    )
    mixes = Mixes(*kernel.predict_mixes(*given, rms_eps=RMS_EPS, eps=EPS, iterations=ITERATIONS))
    error = max(relative_error(out, wanted) for out, wanted in zip(mixes, expected, strict=True))
    stream_bytes = count * S * D * 2
    yield row(
        "mhc predict",
        f"{count}",
        graph_us(lambda: kernel.predict_mixes(*given, rms_eps=RMS_EPS, eps=EPS, iterations=ITERATIONS)),
        bytes=stream_bytes + fn.numel() * 4,
        flops=2 * count * OUT * S * D,
        error=error,
        peer="DeepGEMM projection alone",
        peer_us=_deep_gemm_us(count),
    )
    error = relative_error(kernel.collapse(streams, mixes.pre), reference.collapse(streams.float(), mixes.pre))
    yield row(
        "mhc collapse",
        f"{count}",
        graph_us(lambda: kernel.collapse(streams, mixes.pre)),
        bytes=stream_bytes + count * D * 2,
        error=error,
        peer="torch",
        peer_us=graph_us(lambda: reference.collapse(streams, mixes.pre)),
    )
    expanded = reference.expand(y.float(), streams.float(), mixes)
    error = relative_error(kernel.expand(y, streams, mixes.post, mixes.comb), expanded)
    yield row(
        "mhc expand",
        f"{count}",
        graph_us(lambda: kernel.expand(y, streams, mixes.post, mixes.comb)),
        bytes=2 * stream_bytes + count * D * 2,
        error=error,
        peer="torch",
        peer_us=graph_us(lambda: reference.expand(y, streams, mixes)),
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
