"""Index queries in plain torch: rotation, then the round trip."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.quantise import MXFP4_BLOCK32
from whalepod.kernels.rope import rotary_factors, rotate


def index_queries(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return MXFP4_BLOCK32.round_trip(rotate(queries, *rotary_factors(cos, sin, queries.shape[2])))
