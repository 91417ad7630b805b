"""Index queries as they are multiplied with keys: turned by their position and rounded as the keys are."""

from __future__ import annotations

from torch import Tensor

from . import reference

__all__ = ["index_queries"]


def index_queries(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """queries [rows, heads, width]; cos, sin [rows, pairs] float32 -> the same shape and dtype: the last 2 · pairs
    channels turned, then what an `MXFP4_BLOCK32` record of each head would hold."""
    assert cos.shape == sin.shape and cos.shape[0] == queries.shape[0], (queries.shape, cos.shape)
    if not queries.is_cuda:
        return reference.index_queries(queries, cos, sin)
    from .triton_kernel import index_queries as on_gpu

    return on_gpu(queries, cos, sin)
