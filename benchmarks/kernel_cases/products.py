"""Products of bfloat16 as the network does them: grouped output projection by the library, experts by a plain kernel.
Their tuning, and quantised weights, are not this table's matter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whalepod.kernels.experts import routed_experts
from whalepod.kernels.experts.reference import routed_experts as plain_experts
from whalepod.kernels.linear import grouped_linear

from .measuring import Row, graph_us, relative_error, row

GROUPS, GROUP_WIDTH, RANK = 8, 4096, 1024
EXPERTS, CHOICES, D, COLUMNS = 48, 6, 5120, 2304
"""As many experts as one of eight GPUs holds."""


def rows() -> Iterator[Row]:
    generator = torch.Generator("cuda").manual_seed(9)
    matrix = torch.randn(GROUPS, RANK, GROUP_WIDTH, device="cuda", generator=generator).bfloat16()
    for count in (48, 384, 1536):
        x = torch.randn(count, GROUPS, GROUP_WIDTH, device="cuda", generator=generator).bfloat16()
        wanted = torch.einsum("rgi,goi->rgo", x.float(), matrix.float())
        yield row(
            "grouped output projection",
            f"{count}",
            graph_us(lambda x=x: grouped_linear(x, matrix)),
            bytes=2 * (x.numel() + matrix.numel() + count * GROUPS * RANK),
            flops=2 * count * GROUPS * GROUP_WIDTH * RANK,
            error=relative_error(grouped_linear(x, matrix), wanted),
        )
    gate_up = (torch.randn(EXPERTS, 2 * COLUMNS, D, device="cuda", generator=generator) * D**-0.5).bfloat16()
    down = (torch.randn(EXPERTS, D, COLUMNS, device="cuda", generator=generator) * COLUMNS**-0.5).bfloat16()
    for count in (48, 384, 1536):
        x = torch.randn(count, D, device="cuda", generator=generator).bfloat16()
        ids = torch.rand(count, EXPERTS, device="cuda", generator=generator).argsort(dim=1)[:, :CHOICES]
        weights = torch.softmax(torch.randn(count, CHOICES, device="cuda", generator=generator), dim=1)
        some = slice(0, 24)
        wanted = plain_experts(x[some], ids[some], weights[some], gate_up, down, limit=10.0, input_format=None)
        ours = routed_experts(x, ids, weights, gate_up, down, limit=10.0)
        yield row(
            f"experts, {EXPERTS} of them",
            f"{count}",
            graph_us(lambda x=x, ids=ids, weights=weights: routed_experts(x, ids, weights, gate_up, down, limit=10.0)),
            bytes=2 * (gate_up.numel() + down.numel() + 2 * count * D),
            flops=2 * count * CHOICES * 3 * D * COLUMNS,
            error=relative_error(ours[some], wanted),
        )
