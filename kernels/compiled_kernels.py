"""Every GPU kernel at the released model's shapes, each with and without what its constants switch on.

Triton finds a compiled kernel again if it was compiled for arguments like those of the launch: to it, a whole number
that 16 divides is not like one that it does not divide. Here kernels are compiled as launches compile them, for both
where both occur.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from .kernel_names import name_by_source
from .kernel_signatures import (
    ALIGNED,
    ATTENTION_SIGNATURE,
    CANDIDATES_SIGNATURE,
    ENTRIES_SIGNATURE,
    EXPERTS_SIGNATURE,
    MESSAGES_SIGNATURE,
    MHC_SIGNATURE,
    QUERIES_SIGNATURE,
    ROWS_SIGNATURE,
    SAMPLING_SIGNATURE,
    SCORES_SIGNATURE,
    SMALL,
    TOP_SIGNATURE,
    WINDOW_SIGNATURE,
)

ARCHITECTURES: tuple[int, ...] = (90, 100)
SHARED_BYTES = 227 << 10
"""Of a program, on either."""
TENSOR_COLUMNS = 512
"""Of a processor's tensor memory, where it has one."""
POINTERS: Mapping[str, torch.dtype] = {
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i8": torch.int8,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*u8": torch.uint8,
    "*u32": torch.uint32,
}


@dataclass(frozen=True, slots=True)
class Chip:
    """What Triton asks a driver for before it compiles a launch."""

    architecture: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # what one chip has compiled is not for another

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002  there is none
        return 0


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
        """Into Triton's cache, as launches on such a chip would. For a process that launches nothing. Raises what the
        compiler raises, and MemoryError if the chip has not the memory to launch it."""
        name_by_source()
        function = getattr(import_module(f"whalepod.kernels.{self.operation}.{self.module}"), self.name)
        names = [name for name in function.arg_names if name not in self.constants]
        driver.set_active(Chip(architecture))  # pyright: ignore[reportArgumentType]  it is asked for no more
        for number in (16, 17):
            arguments = {name: self._argument(name, number) for name in names}
            compiled = function.warmup(grid=(1,), **arguments, **self.constants, **self.options)
            if missing := memory_missing(compiled.metadata):
                raise MemoryError(missing)

    def _argument(self, name: str, number: int) -> MockTensor | float:
        """Something like what it is in launches; `number` if it is any whole number."""
        kind = self.signature[name]
        if kind in POINTERS:
            return MockTensor(POINTERS[kind])
        if kind == "fp32":
            return 0.5
        return 16 if name in ALIGNED else 17 if name in SMALL else number


def memory_missing(metadata: Any) -> str | None:  # noqa: ANN401  of a kernel, as Triton has compiled it
    """What a launch would need and the chip lacks: it compiles, and no launch of it succeeds."""
    columns = getattr(metadata, "tmem_size", None) or 0  # chips before sm_100 have none, and take none
    if metadata.shared > SHARED_BYTES:
        return f"takes {metadata.shared} of {SHARED_BYTES} bytes of shared memory"
    return f"takes {columns} of {TENSOR_COLUMNS} columns of tensor memory" if columns > TENSOR_COLUMNS else None


def kernels() -> list[Kernel]:
    return [*_attention(), *_index_scores(), *_selection(), *_caches(), *_experts(), *_streams(), *_sampling()]


def _attention() -> Iterator[Kernel]:
    attention = {"HEADS": 64, "HALF": 256, "PAIRS": 32}
    plain = attention | {"KEYS": 64, "FAST": True}
    combine = attention | {"HEAD_BLOCK": 64, "HEADS_EACH": 8, "PARTS": 2, "FAST": True}
    hopper: dict[str, Any] = {"module": "gluon_kernel", "architectures": (90,), "options": {"num_warps": 8}}
    yield from (
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
                plain | {"CHOSEN": chosen, "PARTS": parts, "HEAD_BLOCK": heads},
                {"num_warps": 8, "num_stages": 2},
                architectures=(architecture,),
            )
            for architecture, heads in ((90, 64), (100, 32))
            for chosen, parts in ((512, 1), (512, 2), (0, 1))
        ),
        Kernel("sparse_attention", "combine_parts_kernel", ATTENTION_SIGNATURE, combine),
    )


def _index_scores() -> Iterator[Kernel]:
    yield from (
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
        *(
            Kernel(
                "packed_index_scores",
                "index_scores_kernel",
                SCORES_SIGNATURE,
                {"ENTRIES": 256, "HEADS": 32, "ROWS": 2, "PARTS": parts},
                {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": False},
                module="gluon_kernel",
                architectures=(90,),
            )
            for parts in (1, 3, 4)
        ),
    )


def _selection() -> Iterator[Kernel]:
    top = {"COUNT": 512, "GROUP": 32}
    candidates = {"BLOCK": 8, "ENTRIES": 256}
    any_width = candidates | {"WIDTH": 32, "HEADS": 8, "KEYS": 64}
    yield from (
        Kernel("top_entries", "maxima_kernel", TOP_SIGNATURE, top | {"CHUNK": 2048}),
        *(
            Kernel(
                "top_entries", "choose_kernel", TOP_SIGNATURE, top | {"CAPACITY": 2048, "SLOTS": 4096} | gathered, sizes
            )
            for gathered, sizes in (
                ({"GATHERED": 8192}, {"num_warps": 16}),
                ({"GATHERED": 4096}, {"num_warps": 8, "maxnreg": 80}),
            )
        ),
        *(
            Kernel(
                "packed_index_scores",
                "any_width_kernel",
                CANDIDATES_SIGNATURE,
                any_width | {"RESTRICTED": restricted},
                module="any_width_kernel",
            )
            for restricted in (False, True)
        ),
        Kernel(
            "candidates",
            "block_maxima_kernel",
            CANDIDATES_SIGNATURE | {"blocks": "i32"},
            {"BLOCK": 8, "WIDE": 8, "CHUNK": 256},
        ),
        Kernel(
            "candidates",
            "candidate_scores_kernel",
            CANDIDATES_SIGNATURE,
            candidates | {"HEADS": 32, "KEYS": 128, "TILES": 16, "FAST": True},
            {"num_warps": 4, "num_stages": 3},
        ),
        Kernel("candidates", "seen_candidates_kernel", CANDIDATES_SIGNATURE, {"BLOCK": 8, "WIDE": 2048}),
        *(
            Kernel(
                "candidates",
                "entry_places_kernel",
                CANDIDATES_SIGNATURE,
                candidates | {"RESTRICTED": restricted, "WIDE": 512},
            )
            for restricted in (False, True)
        ),
        *_early_and_late(
            "index_queries",
            "index_queries_kernel",
            QUERIES_SIGNATURE,
            {"HEADS": 32, "HALF": 64, "PAIRS": 32, "VECTORS": 16},
        ),
        *_early_and_late(
            "index_queries",
            "index_queries_kernel",
            QUERIES_SIGNATURE,
            {"HEADS": 32, "HALF": 64, "PAIRS": 32, "VECTORS": 4},
            num_warps=1,
        ),
    )


def _caches() -> Iterator[Kernel]:
    entry = {"WIDTH": 512, "PAIRS": 32}
    yield from (
        *_early_and_late("window_rows", "window_rows_kernel", WINDOW_SIGNATURE, entry | {"ROWS": 4}),
        *(
            kernel
            for ratio in (1, 2)
            for kernel in _early_and_late(
                "global_entries", "entry_rows_kernel", ENTRIES_SIGNATURE, entry | {"RATIO": ratio}
            )
        ),
        *(
            Kernel(
                "global_entries",
                "key_rows_kernel",
                ENTRIES_SIGNATURE,
                {"WIDTH": 128, "LATENT": 512, "STEP": step, "PAIRS": 32, "ROWS": rows, "FAST": True, "EARLY": True},
                {"num_warps": 8, "num_stages": 4, "launch_pdl": True},
            )
            for rows, step in ((16, 512), (64, 64))
        ),
        Kernel("global_entries", "keep_rows_kernel", ENTRIES_SIGNATURE, {"WIDTH": 1024, "BLOCK": 1024}),
        *(
            Kernel(
                "record_runs",
                "copy_runs_kernel",
                {"table": "*i64", "data": "*u32" if unit == 4 else "*u8"},
                {"BLOCK": 2048, "UNIT": unit, "GATHER": gather},
            )
            for unit in (1, 4)
            for gather in (False, True)
        ),
    )


def _experts() -> Iterator[Kernel]:
    deal: dict[str, Any] = {"EXPERTS": 384, "WIDE": 512}
    product = {"EXPERTS": 384, "STEP": 128, "FAST": True}
    pipelined = {"num_warps": 4, "num_stages": 3}
    messages = {"CHOSEN": 6, "CHOICES": 8, "BLOCK": 1024}
    yield from (
        Kernel("experts", "count_kernel", EXPERTS_SIGNATURE, {"BLOCK": 256}),
        Kernel("experts", "tiles_kernel", EXPERTS_SIGNATURE, deal | {"ROWS": 16, "TILES": 64}),
        Kernel("experts", "order_kernel", EXPERTS_SIGNATURE, deal | {"BLOCK": 256}),
        *(
            Kernel(
                "experts",
                "gate_up_kernel",
                EXPERTS_SIGNATURE,
                product | {"WIDTH": 5120, "ROWS": rows, "COLUMNS": 64, "ROUND": rounded},
                pipelined,
            )
            for rows, rounded in ((16, True), (64, False))
        ),
        *(
            Kernel(
                "experts",
                "down_kernel",
                EXPERTS_SIGNATURE,
                product | {"WIDTH": 2304, "ROWS": rows, "COLUMNS": 128},
                pipelined,
            )
            for rows in (16, 64)
        ),
        Kernel("experts", "sum_choices_kernel", EXPERTS_SIGNATURE, {"CHOICES": 6, "BLOCK": 1024}),
        *_early_and_late(
            "experts",
            "swiglu_kernel",
            EXPERTS_SIGNATURE | {"out": "*bf16"},
            {"ROWS": 8, "COLUMNS": 256, "ROUND": True},
            num_warps=8,
        ),
        *(
            Kernel(
                "expert_messages",
                "pack_kernel",
                MESSAGES_SIGNATURE,
                messages | {"PEERS": peers},
                {"num_warps": 2},
            )
            for peers in (False, True)
        ),
        Kernel("expert_messages", "unpack_kernel", MESSAGES_SIGNATURE, messages, {"num_warps": 2}),
        *(
            Kernel("expert_messages", name, MESSAGES_SIGNATURE, {"BLOCK": 1024}, {"num_warps": warps})
            for name, warps in (("encode_kernel", 2), ("decode_kernel", 2), ("put_outputs_kernel", 4))
        ),
        Kernel("expert_messages", "meet_kernel", MESSAGES_SIGNATURE, {"PEERS": 64}, {"num_warps": 1}),
        Kernel(
            "expert_messages",
            "gather_sum_kernel",
            MESSAGES_SIGNATURE,
            {"CHOSEN": 6, "BLOCK": 1024},
            {"num_warps": 4, "enable_fp_fusion": False},
        ),
        Kernel(
            "router",
            "choose_kernel",
            ROWS_SIGNATURE,
            {"EXPERTS": 384, "WIDE": 512, "CHOSEN": 6, "SLOTS": 8},
            {"num_warps": 2},
        ),
    )


def _streams() -> Iterator[Kernel]:
    row = {"WIDTH": 5120, "CHUNK": 1024, "CHUNKS": 5}
    yield from (
        Kernel(
            "mhc",
            "project_kernel",
            MHC_SIGNATURE,
            {"OUT": 24, "OUT_BLOCK": 32, "ROWS": 64, "STEP": 128, "FAST": True},
            {"num_warps": 4, "num_stages": 3, "launch_pdl": True},
        ),
        *(
            Kernel(
                "mhc",
                "finish_kernel",
                MHC_SIGNATURE,
                {"S": 4, "OUT_BLOCK": 32, "ROWS": rows, "PARTS": parts, "FAST": True},
                {"num_warps": 1, "launch_pdl": True},
            )
            for rows, parts in ((4, 4), (4, 8), (4, 16), (4, 32), (1, 128))
        ),
        *_early_and_late("mhc", "collapse_kernel", MHC_SIGNATURE, {"S": 4, "BLOCK": 1024}),
        *_early_and_late("mhc", "expand_kernel", MHC_SIGNATURE, {"S": 4, "BLOCK": 1024}),
        *_early_and_late("rms_norm", "rms_norm_kernel", ROWS_SIGNATURE, row | {"QUANTISE": False}),
        *_early_and_late("rms_norm", "rms_norm_kernel", ROWS_SIGNATURE, row | {"QUANTISE": True}),
        *_early_and_late("quantise", "round_trip_kernel", ROWS_SIGNATURE, {"BLOCK": 2048}),
        *_early_and_late("engram_gate", "let_in_kernel", ROWS_SIGNATURE, row | {"S": 4, "MASKED": True}),
    )


def _early_and_late(
    operation: str, name: str, signature: Mapping[str, str], constants: Mapping[str, Any], *, num_warps: int = 4
) -> Iterator[Kernel]:
    """Launched while the kernel before it runs, and not (`packing_kernel.comes_early`)."""
    for early in (True, False):
        options = {"num_warps": num_warps, "launch_pdl": early}
        yield Kernel(operation, name, signature, dict(constants) | {"EARLY": early}, options)


def _sampling() -> Iterator[Kernel]:
    parts = {"PARTS": 16, "TILE": 1024, "TILES": 8}
    yield from (
        Kernel("sampling", "edits_kernel", SAMPLING_SIGNATURE, {"BLOCK": 256}),
        Kernel("sampling", "masks_kernel", SAMPLING_SIGNATURE, {"TILE": 1024}),
        *(Kernel("sampling", "draw_kernel", SAMPLING_SIGNATURE, parts | {"WIDE": wide}) for wide in (False, True)),
        *(
            Kernel("sampling", "join_kernel", SAMPLING_SIGNATURE, {"PARTS": 16, "WIDE": wide}, {"num_warps": 1})
            for wide in (False, True)
        ),
        *(
            Kernel("sampling", "masses_kernel", SAMPLING_SIGNATURE, parts | {"DIVIDE": divide})
            for divide in (False, True)
        ),
        Kernel("sampling", "choose_kernel", SAMPLING_SIGNATURE, {"COUNT": 1024, "PARTS": 16}),
    )
