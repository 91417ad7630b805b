"""Compiles the GPU kernels that steps of the released model launch. Needs no GPU, and computes nothing.

    python -m whalepod.model.kernel_cache [--config FILE] [--architecture 90] [--sequences N] [--processes N]

    network of tensors without memory ─▶ steps ─▶ launches ─▶ compiled, as on a GPU ─▶ $TRITON_CACHE_DIR

Triton finds a kernel again only if it was compiled for just such arguments as a launch has: constants, types, which
pointers and numbers 16 divides. So nobody lists them: the steps themselves say. What steps do not launch (drawing,
copies of state, messages between ranks) is in `kernels/compiled_kernels.py`. Prints last one JSON object: for each chip
how many launches differ, and how many kernels it has not the memory for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from whalepod.kernels.compiled_kernels import ARCHITECTURES, Chip, memory_missing
from whalepod.kernels.kernel_names import name_by_source
from whalepod.kernels.numerics import whole_batches
from whalepod.kernels.quantise import FP8_BLOCK32

from .batch import Segment
from .batch_plan import BatchPlan
from .caches import Caches
from .config import ModelConfig
from .decode_graphs import batch_sizes, shape_of
from .draft import Anchor
from .network import Network
from .plan_transfer import stage, unstage
from .record_formats import RELEASE_FORMATS
from .tensor_layout import tensor_specs

RELEASED = Path(__file__).with_name("released_config.json")
SEQUENCES, CHUNK_ROWS = 64, (512, 500, 128, 77)
CONTEXTS = (1024, 8192)
PROCESSORS = {90: 132, 100: 148}


class _OnGpu(TorchFunctionMode):
    """Tensors without memory say that they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func == torch.Tensor.is_cuda.__get__:  # pyright: ignore[reportAttributeAccessIssue]  a property of C
            return args[0].is_meta
        return func(*args, **(kwargs or {}))


class Launches:
    """Of one process, which must launch nothing else. Kernels are compiled when they are launched for the first time:
    every `of`-th that differs, from the `own`-th on; the others are passed over."""

    def __init__(self, architecture: int, *, own: int = 0, of: int = 1) -> None:
        self.seen: dict[tuple[str, str], None] = {}
        """Name of each kernel, and for which arguments."""
        self.too_large: set[str] = set()
        """Kernels that the chip has not enough memory for: a launch of one fails."""
        name_by_source()
        self._own, self._of = own, of
        major, minor = divmod(architecture, 10)
        processors = SimpleNamespace(multi_processor_count=PROCESSORS[architecture])
        torch.cuda.get_device_capability = lambda *_: (major, minor)
        torch.cuda.get_device_properties = lambda *_: processors
        knobs.runtime.jit_cache_hook = self._passes_over
        # Triton has no other place between its compiler and a GPU.
        CompiledKernel._init_handles = _loader(self.too_large)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        driver.set_active(Chip(architecture))  # pyright: ignore[reportArgumentType]  it is asked for no more

    def _passes_over(self, *, key: str, fn: Any, **_: object) -> bool:  # noqa: ANN401  Triton's
        named = f"{fn.module}.{fn.name}", key
        self.seen.setdefault(named)
        return list(self.seen).index(named) % self._of != self._own


def _loader(too_large: set[str]) -> Callable[[CompiledKernel], None]:
    """What takes the place of bringing a kernel to a GPU: its launches do nothing."""

    def load(self: CompiledKernel) -> None:
        self._run = lambda *_: None  # pyright: ignore[reportPrivateUsage]
        if memory_missing(self.metadata):
            too_large.add(self.name)

    return load


def launch_steps(config: ModelConfig, *, sequences: int = SEQUENCES) -> None:
    """Decode steps of batches that graphs are recorded for, with drafts and without, and chunks of prompts, in both
    fidelities."""
    with _OnGpu():
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=torch.float32 if spec.float32 else torch.bfloat16, device="meta")
            for spec in tensor_specs(config)
        }
        rounds = FP8_BLOCK32 if config.quantization_config is not None else None
        network = Network(config, tensors, engram_tables={}, token_map=torch.empty(0), input_format=rounds)
        caches = Caches.allocate(config, blocks=1, slots=1, formats=RELEASE_FORMATS, device="meta")
        for fast in (True, False):
            with whole_batches(fast):
                for segments in _steps(config, sequences):
                    _launch(network, caches, segments)


def _steps(config: ModelConfig, sequences: int) -> Iterator[list[Segment]]:
    for rows in (1, 1 + config.dspark_block_size) if config.num_nextn_predict_layers else (1,):
        for size in batch_sizes(sequences, rows=rows):
            for context in CONTEXTS:
                yield [_segment(config, context - rows, rows)] * size
    for rows in CHUNK_ROWS:
        for start in (0, max(CONTEXTS)):
            yield [_segment(config, start, rows)]


def _segment(config: ModelConfig, start: int, rows: int) -> Segment:
    table = range(-(-(start + rows) // config.block_tokens))
    return Segment(
        slot=0,
        block_table=tuple(table),
        start=start,
        token_ids=(config.eos_token_id,) * rows,
        history=(),
        logits_start=start + rows - 1,
    )


def _launch(network: Network, caches: Caches, segments: list[Segment]) -> None:
    several = len(segments[0].token_ids) > max(1, network.config.dspark_block_size + 1)
    shape = None if several else shape_of(segments, block_tokens=caches.block_tokens)
    plan = BatchPlan.on_host(segments, network.config, caches, packed=True, shape=shape)
    there = unstage(plan, torch.empty_like(stage(plan, pinned=False), device="meta"))
    rows = len(there.token_ids)
    memories = {
        layer.number: layer.engram.projection.weight.new_empty(rows, layer.engram.projection.weight.shape[1])
        for layer in network.layers
        if layer.engram is not None
    }
    run = network.begin_planned(there, caches, text=None, memories=memories)
    network.logits(network.run(run))
    if network.drafter is not None and len(segments[0].token_ids) == 1:
        anchors = [Anchor(segment.slot, segment.start, segment.token_ids[0], window_start=0) for segment in segments]
        network.drafter.draft(anchors, caches, choose=_any_ids, tokens=network.config.dspark_block_size)


def _any_ids(_: int, logits: Tensor) -> Tensor:
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)


def released_config(file: Path = RELEASED) -> ModelConfig:
    """Without images, whose encoder has no kernels of ours."""
    values = json.loads(file.read_text(encoding="utf-8"))
    values.pop("vision_config", None)
    return ModelConfig.from_json(values)


def compile_share(file: Path, sequences: int, architecture: int, own: int, of: int) -> tuple[int, set[str]]:
    """In a process of its own. How many launches differ, and which kernels of the share the chip cannot launch."""
    launches = Launches(architecture, own=own, of=of)
    launch_steps(released_config(file), sequences=sequences)
    return len(launches.seen), launches.too_large


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=RELEASED)
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES, action="append")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="that decode together, at most")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="that compile at a time")
    asked = parser.parse_args()
    figures: dict[str, int] = {}
    for architecture in asked.architecture or ARCHITECTURES:
        with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
            shares = [
                pool.submit(compile_share, asked.config, asked.sequences, architecture, own, asked.processes)
                for own in range(asked.processes)
            ]
            counts, names = zip(*(share.result() for share in shares), strict=True)
        (figures[f"sm_{architecture}_launches"],) = set(counts)
        too_large = sorted(set().union(*names))
        figures[f"sm_{architecture}_too_large"] = len(too_large)
        sys.stderr.writelines(f"{name}: sm_{architecture} has not the memory to launch it\n" for name in too_large)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
