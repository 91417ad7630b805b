"""Feed-forward experts: the routed ones of a row, and the shared one."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.native import library
from whalepod.kernels.quantise import FP8_BLOCK32, PackedFormat

from . import native, reference


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None = None,
) -> Tensor:
    """x [rows, D], ids and weights [rows, chosen], gate_up [experts, 2 · M, D] (gate rows first), down [experts, D, M]
    -> Σ_k weights_k · expert_k(x) [rows, D] in at least float32, summed in the order of `ids`.

    `input_format`: what both matrices' inputs are rounded to first, as the released model does.
    """
    assert ids.shape == weights.shape, (ids.shape, weights.shape)
    assert gate_up.shape[1] == 2 * down.shape[2], (gate_up.shape, down.shape)
    if x.is_cuda and x.dtype == torch.bfloat16 and input_format in (None, FP8_BLOCK32):
        from . import triton_kernel

        return triton_kernel.routed_experts(x, ids, weights, gate_up, down, limit=limit, input_format=input_format)
    if x.is_cuda:
        note_fallback("routed_experts", f"rows are {x.dtype}, inputs rounded to {input_format}")
    if library.takes(x, weights, gate_up, down):
        return native.routed_experts(x, ids, weights, gate_up, down, limit=limit, input_format=input_format)
    return reference.routed_experts(x, ids, weights, gate_up, down, limit=limit, input_format=input_format)


def expert_outputs(
    x: Tensor,
    rows: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None = None,
) -> Tensor:
    """x [rows, D]; pairs of a row of `x` and an expert, `rows` and `experts` [pairs] int64 -> what each expert makes of
    its row, without a routing weight, [pairs, D] in at least float32.

    A pair has the same bits alone and among any others. `combine_outputs` of a row's pairs is `routed_experts`. On a
    GPU a pair may name no expert, by the number behind the last one: what comes of it is left open.
    """
    assert rows.shape == experts.shape, (rows.shape, experts.shape)
    if x.is_cuda and x.dtype == torch.bfloat16 and input_format in (None, FP8_BLOCK32):
        from . import triton_kernel

        return triton_kernel.expert_outputs(x, rows, experts, gate_up, down, limit=limit, input_format=input_format)
    if x.is_cuda:
        note_fallback("expert_outputs", f"rows are {x.dtype}, inputs rounded to {input_format}")
    if library.takes(x, gate_up, down):
        return native.expert_outputs(x, rows, experts, gate_up, down, limit=limit, input_format=input_format)
    return reference.expert_outputs(x, rows, experts, gate_up, down, limit=limit, input_format=input_format)


def combine_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [rows, chosen, D], weights [rows, chosen], both in at least float32 -> Σ_k weights_k · outputs_k
    [rows, D], summed in the order of the choices."""
    assert outputs.shape[:2] == weights.shape, (outputs.shape, weights.shape)
    if outputs.is_cuda and outputs.dtype == torch.float32:
        from . import triton_kernel

        return triton_kernel.combine_outputs(outputs, weights)
    if library.takes(outputs, weights):
        return native.combine_outputs(outputs, weights)
    return reference.combine_outputs(outputs, weights)


def dense_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float, input_format: PackedFormat | None = None
) -> Tensor:
    """x [rows, D], gate_up [2 · M, D] (gate rows first), down [D, M] -> [rows, D] in the dtype of `x`.

    `input_format` as above.
    """
    assert gate_up.shape[0] == 2 * down.shape[1], (gate_up.shape, down.shape)
    if x.is_cuda and x.dtype == torch.bfloat16 and input_format in (None, FP8_BLOCK32):
        from . import triton_kernel

        return triton_kernel.dense_expert(x, gate_up, down, limit=limit, input_format=input_format)
    if library.takes(x, gate_up, down):
        return native.dense_expert(x, gate_up, down, limit=limit, input_format=input_format)
    return reference.dense_expert(x, gate_up, down, limit=limit, input_format=input_format)
