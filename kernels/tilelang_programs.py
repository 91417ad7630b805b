"""Every TileLang program at the released model's shapes, for machines that compile it and run nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import tilelang  # pyright: ignore[reportMissingImports]

from .compiled_kernels import ARCHITECTURES


@dataclass(frozen=True, slots=True)
class Program:
    """One program at one set of sizes."""

    operation: str
    name: str
    constants: Mapping[str, int]
    architectures: tuple[int, ...] = ARCHITECTURES

    def compile(self, architecture: int) -> None:
        """To CUDA, as launches on such a chip would. Raises what the compiler raises."""
        module = import_module(f"whalepod.kernels.{self.operation}.tilelang_kernel")
        with tilelang.tvm.target.Target({"kind": "cuda", "arch": f"sm_{architecture}a"}) as target:
            tilelang.lower(module.program.get_tir(**self.constants), target=target)


def programs() -> list[Program]:
    attention = {"heads": 64, "width": 512, "pairs": 32, "window_rows": 128}
    experts = {"width": 5120, "columns": 2304, "experts": 384}
    return [
        *(Program("sparse_attention", "sparse_attention", attention | {"chosen_count": count}) for count in (512, 0)),
        Program("experts", "gate_up", experts),
    ]
