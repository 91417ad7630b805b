"""Functions that are compiled where they run on a GPU and plain torch elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


_plain: list[None] = []
"""Holds something within `plain`."""


@contextmanager
def plain() -> Generator[None]:
    """Nothing is compiled within: for shapes that each come only once."""
    _plain.append(None)
    try:
        yield
    finally:
        _plain.pop()


def compiled_on_gpu(function: Function) -> Function:
    """`function`, whose first argument is a tensor, compiled for each set of shapes where that tensor lies on a GPU.

    Layers with the same shapes share what is compiled, which is why functions are and not the whole network.
    """
    fast: list[Callable[..., object]] = []  # made at its first use: the compiler is slow to import

    @functools.wraps(function)
    def call(first: Tensor, *rest: object, **named: object) -> object:
        if not first.is_cuda or _plain:
            return function(first, *rest, **named)
        if not fast:
            fast.append(torch.compile(function, dynamic=False))
        return fast[0](first, *rest, **named)

    return call  # pyright: ignore[reportReturnType]  the wrapper has the function's own signature


def prepare_compiler() -> None:
    """Room for every shape of every function, matrix products in TF32 where they are float32."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    torch._dynamo.config.accumulated_recompile_limit = 4096  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
