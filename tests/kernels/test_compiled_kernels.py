"""A kernel that the chip has not the memory for compiles, and is not taken for one that can be launched there."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.house_rules import ROOT
from whalepod.kernels.compiled_kernels import SHARED_BYTES, TENSOR_COLUMNS, memory_missing

COMPILE = """
from dataclasses import replace
from whalepod.kernels.compiled_kernels import kernels
found = [kernel for kernel in kernels() if kernel.name == "sparse_attention_kernel" and 100 in kernel.architectures]
fits = found[0]
fits.compile(100)
try:
    replace(fits, constants=fits.constants | {"HEAD_BLOCK": 64, "KEYS": 64}).compile(100)
except MemoryError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("shared", "columns", "fits"),
    [
        (SHARED_BYTES, None, True),
        (SHARED_BYTES, TENSOR_COLUMNS, True),
        (SHARED_BYTES + 1, None, False),
        (0, TENSOR_COLUMNS + 32, False),
    ],
)
def test_what_a_kernel_takes_is_held_against_what_a_chip_has(shared: int, columns: int | None, fits: bool) -> None:
    assert (memory_missing(SimpleNamespace(shared=shared, tmem_size=columns)) is None) == fits


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_attention_fits_the_chip_and_its_shape_on_the_other_chip_does_not() -> None:
    """In a process of its own: others switch Triton's interpreter on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "columns of tensor memory" in done.stdout


@pytest.mark.slow
def test_tilelang_programs_compile_for_every_chip() -> None:
    pytest.importorskip("tilelang")
    from whalepod.kernels.tilelang_programs import programs

    for program in programs():
        for architecture in program.architectures:
            program.compile(architecture)
