"""Feed-forward experts: the routed ones of a row, and the shared one."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.quantise import PackedFormat

from . import reference


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
    return reference.routed_experts(x, ids, weights, gate_up, down, limit=limit, input_format=input_format)


def dense_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float, input_format: PackedFormat | None = None
) -> Tensor:
    """x [rows, D], gate_up [2 · M, D] (gate rows first), down [D, M] -> [rows, D] in the dtype of `x`.

    `input_format` as above.
    """
    assert gate_up.shape[0] == 2 * down.shape[1], (gate_up.shape, down.shape)
    return reference.dense_expert(x, gate_up, down, limit=limit, input_format=input_format)
