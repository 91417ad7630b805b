"""Every GPU kernel at the released model's shapes, each with and without what its constants switch on.

Triton finds a compiled kernel again if it was compiled for arguments like those of the launch: to it, a whole number
that 16 divides is not like one that it does not divide. Here kernels are compiled as launches compile them, for both
where both occur.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
)
from .launch_sizes import ANY, Sizes, sizes_by_shape

ARCHITECTURES: tuple[int, ...] = (90, 100)
SHARED_BYTES = 227 << 10
"""Of a program, on either."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""Sizes that are Triton's, and no constants of a kernel."""
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
    return [
        *_attention(),
        *_index_scores(),
        *_selection(),
        *_caches(),
        *_experts(),
        *_expert_messages(),
        *_streams(),
        *_sampling(),
    ]


def _tuned(
    kernel: str,
    operation: str,
    name: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    shape: str = ANY,
    early: tuple[bool | None, ...] = (None,),
    module: str = "triton_kernel",
    on: tuple[int, ...] = ARCHITECTURES,
) -> Iterator[Kernel]:
    """With the sizes that tables say for `kernel`. `early`: launched while the kernel before it runs, or not
    (`packing_kernel.comes_early`); None: it does not ask."""
    for sizes, architectures in _sizes(kernel, shape=shape, on=on):
        sized = {size: value for size, value in sizes.items() if size.isupper()}
        options = {size: value for size, value in sizes.items() if size in OPTIONS and value}
        for comes in early:
            more, launch = ({}, {}) if comes is None else ({"EARLY": comes}, {"launch_pdl": comes})
            yield Kernel(
                operation, name, signature, {**constants, **sized, **more}, options | launch, module, architectures
            )


def _sizes(
    kernel: str, *, shape: str = ANY, on: tuple[int, ...] = ARCHITECTURES
) -> list[tuple[Sizes, tuple[int, ...]]]:
    """What tables say for it, each once, and on which chips."""
    found: list[tuple[Sizes, tuple[int, ...]]] = []
    for architecture in on:
        shapes = sizes_by_shape(architecture)[kernel]
        lines = shapes.get(shape) or shapes[ANY]
        for sizes in (*lines.sizes, *([] if lines.exact is None else [lines.exact])):
            before = next((one for one in found if one[0] == sizes), (sizes, ()))
            found = [one for one in found if one is not before] + [(sizes, tuple(sorted({*before[1], architecture})))]
    return found


def _attention() -> Iterator[Kernel]:
    plain = ("sparse_attention", "sparse_attention_kernel", ATTENTION_SIGNATURE)
    attention = {"HEADS": 64, "HALF": 256, "PAIRS": 32}
    for chosen in (512, 0):
        constants = attention | {"CHOSEN": chosen}
        for kernel in _tuned("sparse_attention_hopper", *plain, constants, module="gluon_kernel", on=(90,)):
            yield replace(kernel, options={"num_warps": 8})
        yield from _tuned("sparse_attention", *plain, constants | {"FAST": True})
    split = {sizes["PARTS"] for name in ("sparse_attention", "sparse_attention_hopper") for sizes, _ in _sizes(name)}
    for parts in sorted(split - {1}):
        combine = attention | {"HEAD_BLOCK": 64, "HEADS_EACH": 8, "PARTS": parts, "FAST": True}
        yield Kernel("sparse_attention", "combine_parts_kernel", ATTENTION_SIGNATURE, combine)


def _index_scores() -> Iterator[Kernel]:
    scores = ("packed_index_scores", "index_scores_kernel", SCORES_SIGNATURE)
    heads = {"ENTRIES": 256, "HEADS": 32}
    for rows, parts in ((2, 3), (2, 4), (1, 1)):
        yield from _tuned("index_scores", *scores, heads | {"ROWS": rows, "PARTS": parts, "FAST": True})
    for parts in (1, 3, 4):
        for kernel in _tuned(
            "index_scores_hopper", *scores, heads | {"ROWS": 2, "PARTS": parts}, module="gluon_kernel", on=(90,)
        ):
            yield replace(kernel, options={**kernel.options, "num_warps": 4, "enable_fp_fusion": False})


def _selection() -> Iterator[Kernel]:
    top = {"COUNT": 512, "GROUP": 32}
    candidates = {"BLOCK": 8, "ENTRIES": 256}
    any_width = candidates | {"WIDTH": 32, "HEADS": 8, "KEYS": 64}
    queries = {"HEADS": 32, "HALF": 64, "PAIRS": 32}
    yield from (
        *_tuned("group_maxima", "top_entries", "maxima_kernel", TOP_SIGNATURE, top),
        *_tuned("top_entries", "top_entries", "choose_kernel", TOP_SIGNATURE, top | {"CAPACITY": 2048, "SLOTS": 4096}),
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
        *(
            Kernel(
                "candidates",
                "block_maxima_kernel",
                CANDIDATES_SIGNATURE | {"blocks": "i32"},
                {"BLOCK": 8, "WIDE": 8, "CHUNK": sizes["entries"] // 8},
                {"num_warps": sizes["num_warps"]},
                architectures=architectures,
            )
            for sizes, architectures in _sizes("block_maxima")
        ),
        *_tuned(
            "candidate_scores",
            "candidates",
            "candidate_scores_kernel",
            CANDIDATES_SIGNATURE,
            candidates | {"HEADS": 32, "FAST": True},
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
        *_tuned(
            "index_queries", "index_queries", "index_queries_kernel", QUERIES_SIGNATURE, queries, early=(True, False)
        ),
    )


def _caches() -> Iterator[Kernel]:
    latent = {"LATENT": 1280, "LATENT_CHUNK": 256, "LATENT_STRIDE": 1792}
    window = {"WINDOW": 512, "WINDOW_CHUNK": 512, "WINDOW_STRIDE": 1792, "PAIRS": 32}
    none = {"LATENT": 0, "LATENT_CHUNK": 0, "LATENT_STRIDE": 0, "ENTRY": 0, "ENTRY_CHUNK": 0, "RATIO": 0}
    entry = {"ENTRY": 512, "ENTRY_CHUNK": 128}
    kinds = [latent, {}, *(latent | entry | {"RATIO": ratio} for ratio in (1, 2))]
    yield from (
        *(
            Kernel(
                "attention_rows",
                "attention_rows_kernel",
                ENTRIES_SIGNATURE,
                none | window | kind | {"ROUND": rounded, "ROWS": sizes["num_warps"], "EARLY": early},
                {"num_warps": sizes["num_warps"], "launch_pdl": early},
                architectures=architectures,
            )
            for sizes, architectures in _sizes("attention_rows")
            for kind in kinds
            for rounded in ((True, False) if "LATENT" in kind else (False,))
            for early in (True, False)
        ),
        *_tuned(
            "index_keys",
            "attention_rows",
            "index_keys_kernel",
            ENTRIES_SIGNATURE,
            {"WIDTH": 128, "LATENT": 512, "PAIRS": 32, "FAST": True},
            early=(True, False),
            module="key_kernel",
        ),
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
    product = {"EXPERTS": 384, "FAST": True}
    gate_up = ("experts_gate_up", "experts", "gate_up_kernel", EXPERTS_SIGNATURE)
    down = ("experts_down", "experts", "down_kernel", EXPERTS_SIGNATURE)
    for rows in sorted({sizes["ROWS"] for sizes, _ in _sizes("expert_tiles")}):
        yield Kernel("experts", "tiles_kernel", EXPERTS_SIGNATURE, deal | {"ROWS": rows, "TILES": 64})
        for rounded in (True, False):
            constants = product | {"WIDTH": 5120, "ROWS": rows, "ROUND": rounded}
            yield from _tuned(*gate_up, constants, shape=str(rows))
        yield from _tuned(*down, product | {"WIDTH": 2304, "ROWS": rows}, shape=str(rows))
    signature = EXPERTS_SIGNATURE | {"out": "*bf16"}
    yield from _tuned("swiglu", "experts", "swiglu_kernel", signature, {"ROUND": True}, early=(True, False))
    yield from (
        Kernel("experts", "count_kernel", EXPERTS_SIGNATURE, {"BLOCK": 256}),
        Kernel("experts", "order_kernel", EXPERTS_SIGNATURE, deal | {"BLOCK": 256}),
        Kernel("experts", "sum_choices_kernel", EXPERTS_SIGNATURE, {"CHOICES": 6, "BLOCK": 1024}),
        Kernel(
            "router",
            "choose_kernel",
            ROWS_SIGNATURE,
            {"EXPERTS": 384, "WIDE": 512, "CHOSEN": 6, "SLOTS": 8},
            {"num_warps": 2},
        ),
    )


def _expert_messages() -> Iterator[Kernel]:
    messages = {"CHOSEN": 6, "CHOICES": 8, "BLOCK": 1024}
    yield from (
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
    )


def _streams() -> Iterator[Kernel]:
    row = {"WIDTH": 5120, "CHUNK": 1024, "CHUNKS": 5}
    both: dict[str, Any] = {"early": (True, False)}
    for sizes, architectures in _sizes("mhc_predict"):
        yield Kernel(
            "mhc",
            "project_kernel",
            MHC_SIGNATURE,
            {"OUT": 24, "OUT_BLOCK": 32, "ROWS": 64, "STEP": 128, "FAST": True},
            {"num_warps": 4, "num_stages": sizes["num_stages"], "launch_pdl": True},
            architectures=architectures,
        )
        yield from (
            Kernel(
                "mhc",
                "finish_kernel",
                MHC_SIGNATURE,
                {"S": 4, "OUT_BLOCK": 32, "ROWS": sizes["finish_rows"], "PARTS": parts, "FAST": True},
                {"num_warps": 1, "launch_pdl": True},
                architectures=architectures,
            )
            for parts in (4, 8, 16, 32, 64, 128)
            if parts < 2 * sizes["parts_max"]
        )
    yield from (
        *_tuned("mhc_collapse", "mhc", "collapse_kernel", MHC_SIGNATURE, {"S": 4}, **both),
        *_tuned("mhc_expand", "mhc", "expand_kernel", MHC_SIGNATURE, {"S": 4}, **both),
        *_tuned("rms_norm", "rms_norm", "rms_norm_kernel", ROWS_SIGNATURE, row | {"QUANTISE": False}, **both),
        *_tuned("rms_norm_fp8", "rms_norm", "rms_norm_kernel", ROWS_SIGNATURE, row | {"QUANTISE": True}, **both),
        *_tuned("round_trip", "quantise", "round_trip_kernel", ROWS_SIGNATURE, {}, **both),
        *_tuned("engram_gate", "engram_gate", "let_in_kernel", ROWS_SIGNATURE, row | {"S": 4, "MASKED": True}, **both),
    )


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
