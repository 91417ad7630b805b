"""Gates and values of routed experts in TileLang: what the default kernel is compared with, written another way.

Rows come in tiles of one expert each, as in `triton_kernel.py`, but gathered before. The copy engine brings rows and
weights, four steps ahead of the products.
"""

import tilelang
import tilelang.language as T  # noqa: N812  the name that TileLang's own documents use
import torch
from torch import Tensor

ROWS, COLUMNS, STEP, STAGES, THREADS = 64, 64, 64, 4, 128


@tilelang.jit
def program(*, width: int, columns: int, experts: int) -> "T.PrimFunc":
    """The program for these sizes and any number of rows."""
    pairs, tiles = T.dynamic("pairs, tiles")
    bf16, f32, i32 = "bfloat16", "float32", "int32"

    @T.prim_func
    def gate_up(
        x: T.Tensor((pairs, width), bf16),
        tile_experts: T.Tensor((tiles,), i32),
        tile_starts: T.Tensor((tiles,), i32),
        tile_ends: T.Tensor((tiles,), i32),
        weights: T.Tensor((experts, 2 * columns, width), bf16),
        hidden: T.Tensor((pairs, columns), bf16),
        limit: T.float32,
    ):
        with T.Kernel(columns // COLUMNS, tiles, threads=THREADS) as (block, tile):
            left = T.alloc_shared((ROWS, STEP), bf16)
            gate_weights = T.alloc_shared((COLUMNS, STEP), bf16)
            up_weights = T.alloc_shared((COLUMNS, STEP), bf16)
            gate = T.alloc_fragment((ROWS, COLUMNS), f32)
            up = T.alloc_fragment((ROWS, COLUMNS), f32)
            expert = T.alloc_var(i32, init=tile_experts[tile])
            start = T.alloc_var(i32, init=tile_starts[tile])
            end = T.alloc_var(i32, init=tile_ends[tile])
            column = block * COLUMNS
            if expert < experts:
                T.clear(gate)
                T.clear(up)
                for step in T.Pipelined(width // STEP, num_stages=STAGES):
                    # Rows behind the tile's last are another expert's, and are not stored.
                    T.copy(x[start : start + ROWS, step * STEP : (step + 1) * STEP], left)
                    T.copy(weights[expert, column : column + COLUMNS, step * STEP : (step + 1) * STEP], gate_weights)
                    T.copy(
                        weights[expert, columns + column : columns + column + COLUMNS, step * STEP : (step + 1) * STEP],
                        up_weights,
                    )
                    T.gemm(left, gate_weights, gate, transpose_B=True)
                    T.gemm(left, up_weights, up, transpose_B=True)
                for i, j in T.Parallel(ROWS, COLUMNS):
                    g = T.min(T.cast(T.cast(gate[i, j], bf16), f32), limit)
                    u = T.max(T.min(T.cast(T.cast(up[i, j], bf16), f32), limit), -limit)
                    gate[i, j] = g / (1 + T.exp(-g)) * u
                for i, j in T.Parallel(ROWS, COLUMNS):
                    if start + i < end:
                        hidden[start + i, column + j] = T.cast(gate[i, j], bf16)

    return gate_up


def hidden_values(
    x: Tensor, choices: int, dealt: tuple[Tensor, Tensor, Tensor, Tensor], gate_up: Tensor, *, limit: float
) -> Tensor:
    """As that of `triton_kernel`, for bfloat16 on a GPU that nothing rounds, in tiles of ROWS rows; D and M fill steps
    and tiles of 64."""
    experts, both, width = gate_up.shape
    assert width % STEP == 0 and both // 2 % COLUMNS == 0, f"{width} channels, {both // 2} columns: no whole tiles"
    hidden = torch.empty(len(dealt[0]), both // 2, dtype=x.dtype, device=x.device)
    order, *tiles = dealt
    if len(order):
        run = program(width=width, columns=both // 2, experts=experts)
        run(x.index_select(0, order // choices), *tiles, gate_up, hidden, limit)
    return hidden
