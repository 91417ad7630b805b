"""What follows the first products of attention: one launch of programs of three kinds, and behind it, where there are
entries, one for index keys, which are made of what their programs leave."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packing_kernel import chunk_of, comes_early

from . import EntryRows, LatentRows, WindowRows
from .entry_kernel import entry_part
from .key_kernel import write_index_keys
from .latent_kernel import latent_part
from .window_kernel import window_part

WINDOW_CHUNK, ENTRY_CHUNK = 512, 128
"""Channels that a program holds in one tensor. Each of its warps has a row or a group: bits do not depend on their
number."""


@triton.jit(do_not_specialize=["latent_count", "window_count", "group_count"])
def attention_rows_kernel(
    latent_rows,
    latent_norm,
    latents,
    latent_count,
    window_rows,
    window_norm,
    window_cos,
    window_sin,
    window_destinations,
    window_pool,
    window_count,
    raw,
    ring,
    members,
    keeps,
    entry_norm,
    entry_cos,
    entry_sin,
    entry_destinations,
    entry_latents,
    arrivals,
    entries,
    group_count,
    eps,
    LATENT: tl.constexpr,
    LATENT_CHUNK: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROUND: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_CHUNK: tl.constexpr,
    WINDOW_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    ENTRY_CHUNK: tl.constexpr,
    RATIO: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS groups or rows a program: groups first, for they take longest; then window rows, then latents. A kind of
    width 0 is absent."""
    program = tl.program_id(0)
    if ENTRY > 0:
        programs = tl.cdiv(group_count, ROWS)
        if program < programs:
            entry_part(
                program, raw, ring, members, keeps, entry_norm, entry_cos, entry_sin, entry_destinations, entry_latents,
                arrivals, entries, group_count, eps, ENTRY, PAIRS, RATIO, ENTRY_CHUNK, ROWS, EARLY,
            )  # fmt: skip
        program -= programs
    if WINDOW > 0:
        programs = tl.cdiv(window_count, ROWS)
        if (program >= 0) & (program < programs):
            window_part(
                program, window_rows, window_norm, window_cos, window_sin, window_destinations, window_pool,
                window_count, eps, WINDOW_STRIDE, WINDOW, PAIRS, WINDOW_CHUNK, ROWS, EARLY,
            )  # fmt: skip
        program -= programs
    if LATENT > 0:  # noqa: SIM102  known when it is compiled; the other is not
        if program >= 0:
            latent_part(
                program, latent_rows, latent_norm, latents, latent_count, eps, LATENT_STRIDE, LATENT, LATENT_CHUNK,
                ROUND, ROWS, EARLY,
            )  # fmt: skip


def write_attention_rows(
    latents: LatentRows | None, window: WindowRows | None, entries: EntryRows | None, *, eps: float
) -> Tensor | None:
    """As `whalepod.kernels.attention_rows.write_attention_rows`, for bfloat16 on a GPU, or in Triton's interpreter."""
    some = next(part.norm for part in (entries, window, latents) if part is not None)
    counts = [0 if part is None else len(part) for part in (entries, window, latents)]
    warps = launch_sizes("attention_rows", some, rows=max(counts))["num_warps"]
    programs = [triton.cdiv(count, warps) for count in counts]
    out, latent_arguments, latent_constants = _latents(latents, some)
    window_arguments, window_constants = _window(window, some)
    left, entry_arguments, entry_constants = _entries(entries, some, programs[0])
    turning = entries if window is None else window
    early = comes_early(some, sum(programs))
    if sum(programs):
        attention_rows_kernel[(sum(programs),)](
            *latent_arguments,
            *window_arguments,
            *entry_arguments,
            eps,
            **latent_constants,
            **window_constants,
            **entry_constants,
            PAIRS=0 if turning is None else turning.cos.shape[1],
            ROWS=warps,
            EARLY=early,
            num_warps=warps,
            launch_pdl=early,
        )
    if entries is not None and programs[0]:
        write_index_keys(*left, entries, eps=eps)
    return None if latents is None else out


def _latents(given: LatentRows | None, some: Tensor) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """What is written, and the kernel's arguments and constants; `some` tensor is in the place of absent ones."""
    if given is None:
        return some, (some, some, some, 0), {"LATENT": 0, "LATENT_CHUNK": 0, "LATENT_STRIDE": 0, "ROUND": False}
    rows, (count, width) = _dense(given.rows), given.rows.shape
    out = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    constants = {"LATENT": width, "LATENT_CHUNK": chunk_of(width), "LATENT_STRIDE": rows.stride(0)}
    return out, (rows, given.norm, out, count), constants | {"ROUND": given.rounding is not None}


def _window(given: WindowRows | None, some: Tensor) -> tuple[tuple[Any, ...], dict[str, int]]:
    if given is None:
        return (*(some,) * 6, 0), {"WINDOW": 0, "WINDOW_CHUNK": 0, "WINDOW_STRIDE": 0}
    rows, (count, width) = _dense(given.rows), given.rows.shape
    arguments = (rows, given.norm, given.cos, given.sin, given.destinations, given.pool, count)
    return arguments, {
        "WINDOW": width,
        "WINDOW_CHUNK": math.gcd(width, WINDOW_CHUNK),
        "WINDOW_STRIDE": rows.stride(0),
    }


def _entries(
    given: EntryRows | None, some: Tensor, programs: int
) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...], dict[str, int]]:
    """What is left for index keys: latents, and as many counts of 0 as there are programs."""
    if given is None:
        return (some, some), (*(some,) * 11, 0), {"ENTRY": 0, "ENTRY_CHUNK": 0, "RATIO": 0}
    width = len(given.norm)
    latents = torch.empty(len(given), width, dtype=some.dtype, device=some.device)
    arrivals = torch.empty(programs, dtype=torch.int32, device=some.device)
    arguments = (
        given.raw.contiguous(),
        some if given.ring is None else given.ring,
        some if given.members is None else given.members,
        some if given.keeps is None else given.keeps,
        given.norm,
        given.cos,
        given.sin,
        given.destinations,
        latents,
        arrivals,
        given.entries,
        len(given),
    )
    constants = {"ENTRY": width, "ENTRY_CHUNK": math.gcd(width, ENTRY_CHUNK), "RATIO": given.ratio}
    return (latents, arrivals), arguments, constants


def _dense(rows: Tensor) -> Tensor:
    """Rows whose channels are neighbours."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
