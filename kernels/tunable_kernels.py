"""Which sizes of a kernel's launch are tuned, and what each of them may be.

A name in capitals is a constant of the kernel; `num_warps`, `num_stages` and `maxnreg` (0: as many as it wants) are
Triton's; the others are explained here. What layouts in registers or shared memory depend on is no size to tune.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WARPS = (1, 2, 4, 8)
STAGES = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Tunable:
    sizes: Mapping[str, tuple[int, ...]]
    """What each may be; the tuner tries every combination."""
    changes_bits: bool = False
    """Some sizes add numbers in another order. Then a table says apart what `exact` takes, for any number of rows."""


PRODUCT = {"COLUMNS": (64, 128), "STEP": (64, 128), "num_warps": (4, 8), "num_stages": STAGES}

TUNABLES: Mapping[str, Tunable] = {
    # A row a warp.
    "attention_rows": Tunable({"num_warps": WARPS}),
    # Rows of a tile, keys of a slice of the matrix, channels of a step.
    "index_keys": Tunable(
        {
            "ROWS": (16, 32, 64, 128),
            "COLUMNS": (32, 64, 128),
            "STEP": (64, 128, 512),
            "num_warps": (4, 8),
            "num_stages": STAGES,
        },
        changes_bits=True,
    ),
    "rms_norm": Tunable({"num_warps": WARPS}, changes_bits=True),
    "rms_norm_fp8": Tunable({"num_warps": WARPS}, changes_bits=True),
    "engram_gate": Tunable({"num_warps": WARPS}, changes_bits=True),
    # Numbers of a program.
    "round_trip": Tunable({"BLOCK": (512, 1024, 2048, 4096), "num_warps": WARPS}),
    "swiglu": Tunable({"ROWS": (2, 4, 8, 16), "COLUMNS": (128, 256, 512), "num_warps": (2, 4, 8)}),
    # Heads of a program.
    "index_queries": Tunable({"VECTORS": (2, 4, 8, 16, 32), "num_warps": WARPS}),
    # The most parts that a row's channels fall into; rows of a program that adds the parts up.
    "mhc_predict": Tunable(
        {"parts_max": (16, 32, 48, 80), "finish_rows": (1, 2, 4, 8), "num_stages": STAGES}, changes_bits=True
    ),
    "mhc_collapse": Tunable({"BLOCK": (512, 1024, 2048), "num_warps": WARPS}),
    "mhc_expand": Tunable({"BLOCK": (512, 1024, 2048), "num_warps": WARPS}),
    # On Hopper. Programs that share a processor.
    "index_scores_hopper": Tunable({"programs": (2, 3, 4, 5, 6, 8), "maxnreg": (80, 96, 128, 168)}),
    # Elsewhere. Programs of the whole chip.
    "index_scores": Tunable(
        {"KEYS": (64, 128, 256), "programs": (132, 148, 264, 296), "num_warps": (4, 8), "num_stages": STAGES}
    ),
    "group_maxima": Tunable({"CHUNK": (1024, 2048, 4096, 8192), "num_warps": WARPS}),
    "top_entries": Tunable({"GATHERED": (2048, 4096, 8192), "num_warps": (4, 8, 16), "maxnreg": (0, 80)}),
    # Entries of a program, of all its blocks together.
    "block_maxima": Tunable({"entries": (1024, 2048, 4096, 8192), "num_warps": WARPS}),
    "candidate_scores": Tunable(
        {"KEYS": (64, 128, 256), "TILES": (4, 8, 16, 32), "num_warps": (4, 8), "num_stages": STAGES}
    ),
    # Parts that the keys of a row fall into.
    "sparse_attention_hopper": Tunable({"PARTS": (1, 2, 3, 4)}, changes_bits=True),
    "sparse_attention": Tunable(
        {
            "PARTS": (1, 2, 3, 4),
            "HEAD_BLOCK": (16, 32, 64),
            "KEYS": (32, 64),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3),
        },
        changes_bits=True,
    ),
    # Rows of a tile, one expert's; where tables say rows, they count those of an expert, on average.
    "expert_tiles": Tunable({"ROWS": (16, 32, 64, 128)}, changes_bits=True),
    # Their shapes are the rows of a tile.
    "experts_gate_up": Tunable(PRODUCT),
    "experts_down": Tunable(PRODUCT),
}
