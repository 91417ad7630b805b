"""Compiles every GPU kernel at the released model's shapes for the chips we serve on. Needs no GPU.

    python -m whalepod.kernels.compilation

Prints one line a failure, and last one JSON object: kernels, sm_90_failed, sm_100_failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

ARCHITECTURES: tuple[int, ...] = (90, 100)

ATTENTION_SIGNATURE = {
    "queries": "*bf16",
    "window": "*u8",
    "bases": "*i32",
    "positions": "*i32",
    "lowest": "*i32",
    "entries": "*u8",
    "chosen": "*i32",
    "sink": "*fp32",
    "cos": "*fp32",
    "sin": "*fp32",
    "out": "*bf16",
    "part_out": "*fp32",
    "part_stats": "*fp32",
    "logit_scale": "fp32",
    "ring": "i32",
    "window_rows": "i32",
    "chosen_stride": "i32",
    "items": "i32",
}
SCORES_SIGNATURE = {
    "queries": "*bf16",
    "weights": "*fp32",
    "keys": "*u8",
    "tables": "*i32",
    "table_stride": "i32",
    "visible": "*i32",
    "group_starts": "*i32",
    "group_counts": "*i32",
    "group_sequences": "*i32",
    "scores": "*fp32",
    "stride": "i32",
}
TOP_SIGNATURE = {
    "scores": "*fp32",
    "stride": "i32",
    "visible": "*i32",
    "maxima": "*i32",
    "groups": "i32",
    "bounds": "*i32",
    "kept_counts": "*i32",
    "kept_orders": "*i32",
    "kept_entries": "*i32",
    "good_groups": "*i32",
    "out": "*i32",
}
MHC_SIGNATURE = {
    "streams": "*bf16",
    "fn": "*fp32",
    "products": "*fp32",
    "squares": "*fp32",
    "rows": "i32",
    "width": "i32",
    "steps": "i32",
    "parts": "i32",
    "scale": "*fp32",
    "base": "*fp32",
    "pre": "*fp32",
    "post": "*fp32",
    "comb": "*fp32",
    "rms_eps": "fp32",
    "eps": "fp32",
    "iterations": "i32",
    "weights": "*fp32",
    "y": "*bf16",
    "out": "*bf16",
}
WINDOW_SIGNATURE = {
    "rows": "*bf16",
    "weight": "*bf16",
    "cos": "*fp32",
    "sin": "*fp32",
    "destinations": "*i32",
    "pool": "*u8",
    "eps": "fp32",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel at one set of compile-time constants."""

    operation: str
    name: str
    signature: Mapping[str, str]
    """Types of the arguments that it and its neighbours take; pointers are aligned to 16 bytes."""
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=lambda: {"num_warps": 4})
    module: str = "triton_kernel"
    architectures: tuple[int, ...] = ARCHITECTURES

    def compile(self, architecture: int) -> None:
        """Raises what the compiler raises."""
        function = getattr(import_module(f"whalepod.kernels.{self.operation}.{self.module}"), self.name)
        names: list[str] = function.arg_names
        signature = {name: "constexpr" if name in self.constants else self.signature[name] for name in names}
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        aligned = {
            (names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")
        }
        source = (GluonASTSource if self.module == "gluon_kernel" else ASTSource)(
            function, signature, constants, aligned
        )
        triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(self.options))


def kernels() -> list[Kernel]:
    """Every kernel, each with and without what its constants switch on."""
    attention = {"HEADS": 64, "HALF": 256, "PAIRS": 32}
    plain = attention | {"HEAD_BLOCK": 64, "KEYS": 64, "FAST": True}
    combine = attention | {"HEAD_BLOCK": 64, "HEADS_EACH": 8, "PARTS": 2, "FAST": True}
    hopper: dict[str, Any] = {"module": "gluon_kernel", "architectures": (90,), "options": {"num_warps": 8}}
    top = {"COUNT": 512, "CAPACITY": 2048}
    return [
        *(
            Kernel(
                "sparse_attention",
                "sparse_attention_kernel",
                ATTENTION_SIGNATURE,
                attention | {"CHOSEN": chosen, "PARTS": parts},
                **hopper,
            )
            for chosen, parts in ((512, 1), (512, 2), (0, 1))
        ),
        *(
            Kernel(
                "sparse_attention",
                "sparse_attention_kernel",
                ATTENTION_SIGNATURE,
                plain | {"CHOSEN": chosen, "PARTS": parts},
                {"num_warps": 8, "num_stages": 2},
            )
            for chosen, parts in ((512, 1), (512, 2), (0, 1))
        ),
        Kernel("sparse_attention", "combine_parts_kernel", ATTENTION_SIGNATURE, combine),
        *(
            Kernel(
                "packed_index_scores",
                "index_scores_kernel",
                SCORES_SIGNATURE,
                {"ENTRIES": 256, "HEADS": 32, "ROWS": rows, "PARTS": parts, "KEYS": 128, "FAST": True},
                {"num_warps": 4, "num_stages": 3},
            )
            for rows, parts in ((2, 3), (2, 4), (1, 1))
        ),
        Kernel("top_entries", "maxima_kernel", TOP_SIGNATURE, {"GROUP": 32, "CHUNK": 64}),
        Kernel("top_entries", "bound_kernel", TOP_SIGNATURE, {"COUNT": 512, "GROUPS": 4096}, {"num_warps": 8}),
        Kernel(
            "top_entries", "collect_kernel", TOP_SIGNATURE, {"CAPACITY": 2048, "GROUP": 32, "CHUNK": 1024, "TILE": 64}
        ),
        Kernel("top_entries", "finish_kernel", TOP_SIGNATURE, top | {"CHUNK": 2048}, {"num_warps": 8}),
        *(
            Kernel(
                "mhc",
                "project_kernel",
                MHC_SIGNATURE,
                {"OUT": 24, "OUT_BLOCK": 32, "ROWS": rows, "STEP": step, "FAST": True},
                {"num_warps": warps, "num_stages": stages},
            )
            for rows, step, warps, stages in ((16, 128, 4, 3), (64, 128, 4, 3), (128, 64, 8, 4))
        ),
        Kernel("mhc", "finish_kernel", MHC_SIGNATURE, {"S": 4, "OUT_BLOCK": 32, "ROWS": 8}, {"num_warps": 1}),
        Kernel("mhc", "collapse_kernel", MHC_SIGNATURE, {"S": 4, "BLOCK": 1024}),
        Kernel("mhc", "expand_kernel", MHC_SIGNATURE, {"S": 4, "BLOCK": 1024}),
        Kernel("window_rows", "window_rows_kernel", WINDOW_SIGNATURE, {"PAIRS": 32, "WIDTH": 512}, {"num_warps": 2}),
    ]


def main() -> None:
    failed: dict[int, int] = dict.fromkeys(ARCHITECTURES, 0)
    listed = kernels()
    for kernel in listed:
        for architecture in kernel.architectures:
            try:
                kernel.compile(architecture)
            except Exception as error:  # noqa: BLE001  whatever the compiler raises is what this reports
                failed[architecture] += 1
                summary = str(error).strip().splitlines() or [type(error).__name__]
                sys.stderr.write(
                    f"{kernel.operation}.{kernel.name} {dict(kernel.constants)} sm_{architecture}: {summary[-1]}\n"
                )
    figures = {"kernels": len(listed)} | {f"sm_{architecture}_failed": count for architecture, count in failed.items()}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(any(failed.values()))


if __name__ == "__main__":
    main()
