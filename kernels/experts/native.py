"""The operators of `operators.c`."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.native.library import operator
from whalepod.kernels.quantise import PackedFormat

_dense_expert, _expert_pairs = operator("dense_expert"), operator("expert_pairs")
_combine_outputs = operator("collapse")


def dense_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float, input_format: PackedFormat | None
) -> Tensor:
    x, gate_up, down = x.contiguous(), gate_up.contiguous(), down.contiguous()
    width, inner = down.shape
    out = x.new_empty(x.shape[0], width)
    _dense_expert(
        x.data_ptr(), gate_up.data_ptr(), down.data_ptr(), out.data_ptr(), x.shape[0], width, inner, limit,
        *_rounding(input_format),
    )  # fmt: skip
    return out


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None,
) -> Tensor:
    rows, chosen = ids.shape
    outputs = _pair_outputs(x, None, ids, gate_up, down, limit=limit, input_format=input_format)
    return combine_outputs(outputs.view(rows, chosen, x.shape[1]), weights)


def expert_outputs(
    x: Tensor,
    rows: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None,
) -> Tensor:
    return _pair_outputs(x, rows.contiguous(), experts, gate_up, down, limit=limit, input_format=input_format)


def _pair_outputs(
    x: Tensor,
    rows: Tensor | None,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None,
) -> Tensor:
    """As `expert_outputs`; without `rows`, experts [rows, chosen] are those of one row after the other."""
    x, experts, gate_up, down = x.contiguous(), experts.contiguous(), gate_up.contiguous(), down.contiguous()
    count, width, inner = down.shape
    pairs, each = experts.numel(), 1 if rows is not None else experts.shape[1]
    out = x.new_empty(pairs, width)
    _expert_pairs(
        x.data_ptr(), None if rows is None else rows.data_ptr(), experts.data_ptr(),
        gate_up.data_ptr(), down.data_ptr(), out.data_ptr(),
        pairs, each, count, width, inner, limit, *_rounding(input_format),
    )  # fmt: skip
    return out


def combine_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    outputs, weights = outputs.contiguous(), weights.contiguous()
    rows, chosen, width = outputs.shape
    out = outputs.new_empty(rows, width)
    _combine_outputs(outputs.data_ptr(), weights.data_ptr(), out.data_ptr(), rows, chosen, width)
    return out


def _rounding(input_format: PackedFormat | None) -> tuple[bool, bool, int, float]:
    return (False, False, 0, 0.0) if input_format is None else (*input_format.numbers, input_format.amax_min)
