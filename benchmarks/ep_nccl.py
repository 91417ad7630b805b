"""Experts shared by two GPUs through NCCL: right first, then what dispatch and combine take beside a plain exchange.

    torchrun --nproc-per-node 2 benchmarks/ep_nccl.py [--experts N] [--steps N] [--backend gloo [--cpu]] [--rows N …]

One layer of each kind at the released width, random weights, inputs of experts in FP8 as released. Each rank first
computes prompts of its own with all experts (EP1), then the same prompts with the group (EP2): prefill in chunks,
greedy decode, unequal batches. At the end a rank dies in the middle of a step, and the other one goes on with all
experts. `--backend gloo` takes the way through the host's memory; with `--cpu`, small layers on a CPU.

    dispatch_us, combine_us   of one layer, without the experts: routing, packing, exchange; exchange back, weighted sum
    plain_us                  all_to_all_single of as many bytes as that dispatch or combine exchanges
    graph_exchange, graph_memory   low latency from CUDA graphs: through NCCL; written to the other GPU's memory

Medians. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if "LOCAL_RANK" in os.environ:  # as Ray does it: each process sees one GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]

import torch
from expert_cases.layer_timer import LayerTimer
from torch import Tensor

from whalepod.engine.expert_parallel.dispatch import DispatchMode
from whalepod.engine.expert_parallel.expert_bank import ExpertBank
from whalepod.engine.expert_parallel.group import Job
from whalepod.engine.expert_parallel.group_loop import Formed, GroupLoop, Held, LoopOptions, MembershipEndedError
from whalepod.engine.expert_parallel.joining import Meeting, join_group
from whalepod.engine.expert_parallel.placement import even_placement
from whalepod.engine.expert_parallel.process_group import open_store
from whalepod.engine.expert_parallel.rebalancing import RebalanceOptions
from whalepod.engine.expert_parallel.transport import Transport
from whalepod.kernels.fallbacks import fallback_counts
from whalepod.kernels.quantise import FP8_BLOCK32
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.network import Network
from whalepod.model.projection import Weights
from whalepod.model.record_formats import RELEASE_FORMATS
from whalepod.model.routed_experts import LocalExperts, MakeExperts, gate_up_matrix
from whalepod.model.tensor_layout import TensorSpec, tensor_specs

RELEASED = Path(__file__).parents[1] / "model/released_config.json"
SMALL: Mapping[str, Any] = {
    "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 64,
    "sliding_window": 32,
}  # fmt: skip
PROMPT_TOKENS = (300, 77, 515, 130)
CHUNK = 256
KILLED_AT_LAYER = 3
KILL_NOTICED_S = 2.0
"""After so long the one that is left is told, as its watch over the others would."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--cpu", action="store_true", help="small layers, on a CPU; gloo only")
    parser.add_argument("--experts", type=int, default=96, help="of a layer")
    parser.add_argument("--steps", type=int, default=24, help="decode steps")
    parser.add_argument("--rows", type=int, nargs="+", default=[48, 256, 1536, 8192], help="a rank, of what is timed")
    asked = parser.parse_args()
    bench = Bench(cut_config(asked.experts, small=asked.cpu), on_gpu=not asked.cpu, nccl=asked.backend == "nccl")
    load = os.getloadavg()[0]
    bench.say(f"{bench.size} ranks, {asked.backend}, {bench.place()}, torch {torch.__version__}, load {load:.1f}")
    wanted = bench.compute_alone(asked.steps)
    different, survived = bench.compute_together(wanted, asked.steps, timed_rows=asked.rows)
    if bench.rank == 0:
        figures = {
            "different": different,
            "different_after_death": survived,
            "pause_s": round(bench.pause_s, 2),
            "fallbacks": sum(fallback_counts().values()),
            "timed": bench.timed,
        }
        print(json.dumps(figures), flush=True)
    os._exit(0)


def cut_config(experts: int, *, small: bool) -> ModelConfig:
    """One layer of each kind: windows only, source and reader of ratio 2 and 1, a further index source."""
    values: dict[str, Any] = json.loads(RELEASED.read_text(encoding="utf-8"))
    for name in ("vision_config", "quantization_config"):
        values.pop(name)
    values["text_config"] |= {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "n_routed_experts": experts,
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        **(SMALL if small else {}),
    }
    return ModelConfig.from_json(values)


def draw(spec: TensorSpec, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor that every process draws alike."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(spec.name.encode()))
    values = torch.randn(spec.shape, device=device, generator=generator, dtype=torch.float32)
    scale = spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 1
    return values.mul_(scale).to(torch.float32 if spec.float32 else dtype)


@dataclass(frozen=True, slots=True)
class Answers:
    ids: Sequence[Sequence[int]]
    logits: Sequence[Tensor]


@dataclass(slots=True)
class Sequences:
    """One rank's prompts on one network, a chunk of each or a token of each at a time."""

    network: Network
    prompts: Sequence[Sequence[int]]
    ids: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """Of every step that had any, [rows, vocab]."""
    done: list[int] = field(default_factory=list)
    caches: Any = None

    def __post_init__(self) -> None:
        self.ids, self.done = [list(prompt) for prompt in self.prompts], [0] * len(self.prompts)
        config = self.network.config
        self._blocks = 2048 // config.block_tokens
        self.caches = Caches.allocate(
            config,
            blocks=max(1, self._blocks * len(self.prompts)),
            slots=max(1, len(self.prompts)),
            formats=RELEASE_FORMATS,
            device=self.network.device,
        )

    _blocks: int = 0

    def next_rows(self) -> int:
        return sum(min(CHUNK, len(ids) - done) for ids, done in zip(self.ids, self.done, strict=True))

    @property
    def in_prompt(self) -> bool:
        return any(done < len(prompt) for done, prompt in zip(self.done, self.prompts, strict=True))

    def step(self) -> None:
        ends = [min(done + CHUNK, len(ids)) for done, ids in zip(self.done, self.ids, strict=True)]
        segments = [self._segment(number, end) for number, end in enumerate(ends)]
        logits = self.network.forward(segments, self.caches).float().cpu()
        chosen = iter(logits.argmax(dim=1).tolist())
        for number, end in enumerate(ends):
            if end == len(self.ids[number]):
                self.ids[number].append(next(chosen))
        self.done = ends
        self.logits.append(logits)

    def _segment(self, number: int, end: int) -> Segment:
        ids, start = self.ids[number], self.done[number]
        return Segment(
            slot=number,
            block_table=range(number * self._blocks, (number + 1) * self._blocks),
            start=start,
            token_ids=ids[start:end],
            history=[],
            floor=self.network.config.floor(len(self.prompts[number])),
            logits_start=end - 1 if end == len(ids) else None,
        )


class Bench:
    """One rank of it."""

    def __init__(self, config: ModelConfig, *, on_gpu: bool, nccl: bool) -> None:
        self.config = config
        self._nccl = nccl
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.timed: list[dict[str, Any]] = []
        self.pause_s = 0.0
        if not on_gpu:
            torch.set_num_threads(1)
        placement = even_placement(config.n_routed_experts, self.size)
        self.placements = {f"layers.{layer}.ffn.": placement for layer in range(config.num_hidden_layers)}
        self.specs = {spec.name: spec for spec in tensor_specs(config)}
        port = int(os.environ["MASTER_PORT"]) + 1
        self._served = open_store("127.0.0.1", port, is_host=True, timeout_s=120) if self.rank == 0 else None
        self.store = open_store("127.0.0.1", port, is_host=False, timeout_s=120)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def place(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else f"{os.cpu_count()} cores"

    def prompts(self) -> list[list[int]]:
        """Fewer on the last rank: batches are unequal."""
        generator = torch.Generator().manual_seed(self.rank)
        lengths = PROMPT_TOKENS[: len(PROMPT_TOKENS) - 2 * (self.rank == self.size - 1)]
        return [torch.randint(self.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    def network(self, make_experts: MakeExperts, held: Mapping[str, Sequence[int]] | None) -> Network:
        started_s = time.perf_counter()
        tensors = {
            spec.name: draw(spec, self.device, self.dtype)
            for spec in self.specs.values()
            if held is None or spec.expert is None or spec.expert[1] in held[spec.expert[0]]
        }
        network = Network(
            self.config, tensors, engram_tables={}, token_map=None, input_format=FP8_BLOCK32, make_experts=make_experts
        )
        self.say(f"weights: {time.perf_counter() - started_s:.1f} s")
        return network

    def compute_alone(self, steps: int) -> Answers:
        sequences = Sequences(self.network(LocalExperts.from_weights, None), self.prompts())
        started_s = time.perf_counter()
        while sequences.in_prompt:
            sequences.step()
        for _ in range(steps):
            sequences.step()
        self.say(f"EP1: {time.perf_counter() - started_s:.1f} s")
        answers = Answers(sequences.ids, sequences.logits)
        del sequences  # its memory is needed
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return answers

    def compute_together(self, wanted: Answers, steps: int, *, timed_rows: Sequence[int]) -> tuple[int, int]:
        """Steps and sequences that differ from EP1: of all ranks before the last one dies, of rank 0 after it."""
        bank = ExpertBank(self.rank, self.placements)
        network = self.network(bank.make, {name: p.ranks[self.rank] for name, p in self.placements.items()})
        if timed_rows:
            self.time_layers(bank, timed_rows)
        loop = GroupLoop(
            bank,
            Pair(self),
            self.read,
            options=LoopOptions(
                slots_per_rank={name: len(p.ranks[0]) for name, p in self.placements.items()},
                rebalancing=RebalanceOptions(interval_steps=0),
            ),
            on_failure=lambda error: print(f"the loop failed: {error!r}", flush=True),
        )
        loop.start()
        sequences = Sequences(network, self.prompts())
        started_s = time.perf_counter()
        half = steps // 2
        while sequences.in_prompt:
            self.run(loop, sequences)
        for _ in range(half):
            self.run(loop, sequences)
        self.say(f"EP{self.size}: {time.perf_counter() - started_s:.1f} s")
        different = self.differences(sequences, wanted)
        self.store.set(f"different/{self.rank}", str(different))
        different = sum(int(self.store.get(f"different/{rank}")) for rank in range(self.size))
        if self.rank == self.size - 1:
            self.die_within_a_step(loop, bank, sequences)
        before = len(sequences.logits)
        self.notice_death(loop, sequences)
        while len(sequences.logits) < len(wanted.logits):
            self.run(loop, sequences)
        after = self.differences(sequences, wanted, start=before)
        return different, after

    def run(self, loop: GroupLoop, sequences: Sequences) -> None:
        loop.run(Job(rows=sequences.next_rows(), call=sequences.step, prompts=sequences.in_prompt))

    def differences(self, sequences: Sequences, wanted: Answers, *, start: int = 0) -> int:
        pairs = list(zip(sequences.logits, wanted.logits, strict=False))[start:]
        different = sum(not torch.equal(ours, theirs) for ours, theirs in pairs)
        tokens = sum(a != b[: len(a)] for a, b in zip(sequences.ids, wanted.ids, strict=True))
        largest = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
        print(
            f"rank {self.rank}: {len(pairs)} steps, {different} with other bits (largest difference {largest:.3g}), "
            f"{tokens} of {len(wanted.ids)} sequences with other tokens",
            flush=True,
        )
        return different + tokens

    def die_within_a_step(self, loop: GroupLoop, bank: ExpertBank, sequences: Sequences) -> None:
        exchange = bank.exchange
        assert exchange is not None

        def exchange_or_die(layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if layer == KILLED_AT_LAYER:
                os._exit(0)
            return exchange(layer, x, ids, weights)

        bank.exchange = exchange_or_die
        self.store.set("dying", b"1")
        self.run(loop, sequences)

    def notice_death(self, loop: GroupLoop, sequences: Sequences) -> None:
        self.store.wait(["dying"])
        timer = threading.Timer(KILL_NOTICED_S, loop.break_group)
        timer.start()
        while loop.state.epoch == 1:
            started_s = time.perf_counter()
            self.run(loop, sequences)
            self.pause_s = time.perf_counter() - started_s
        self.say(f"a step across the death took {self.pause_s:.1f} s; group {loop.state.epoch}: {loop.state.members}")

    def read(self, experts: Mapping[str, Sequence[int]]) -> dict[str, tuple[Tensor, Tensor]]:
        read: dict[str, tuple[Tensor, Tensor]] = {}
        for prefix, numbers in experts.items():
            names = [name for name, s in self.specs.items() if s.expert in {(prefix, number) for number in numbers}]
            weights = Weights({name: draw(self.specs[name], self.device, self.dtype) for name in names}, prefix)
            read[prefix] = (
                torch.stack([gate_up_matrix(weights, f"experts.{number}") for number in numbers]),
                torch.stack([weights[f"experts.{number}.w2.weight"] for number in numbers]),
            )
        return read

    def join(self, name: str, *, rank: int, size: int) -> tuple[Transport, Transport]:
        meeting = Meeting(self.store, name, rank=rank, size=size, host="127.0.0.1", timeout_s=60, form_timeout_s=60)
        return join_group(meeting, "cuda" if self._nccl else "cpu")

    def time_layers(self, bank: ExpertBank, rows: Sequence[int]) -> None:
        transport, _ = self.join("timing", rank=self.rank, size=self.size)
        placement = next(iter(self.placements.values()))
        for count in rows:
            mode = DispatchMode.LOW_LATENCY if count <= 512 else DispatchMode.NORMAL
            figures = LayerTimer(transport, bank.layers[0], placement, self.device, rows=count, mode=mode).measure()
            self.timed.append(figures)
            self.say(json.dumps(figures))


class Pair:
    """The `Membership` of this benchmark: both ranks, then whoever is left."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._epoch = 0

    def form(self, held: Held) -> Formed:
        bench = self._bench
        self._epoch += 1
        if self._epoch > 1 and bench.rank:
            raise MembershipEndedError
        members = tuple(range(bench.size)) if self._epoch == 1 else (0,)
        steps, mover = bench.join(str(self._epoch), rank=bench.rank, size=len(members))
        everybody = [{name: p.ranks[rank] for name, p in bench.placements.items()} for rank in members]
        return Formed(self._epoch, members, tuple(everybody if self._epoch == 1 else [held]), steps, mover)

    def wake(self, epoch: int, round_number: int) -> None:
        self._bench.store.set(f"wake/{epoch}", str(round_number))


if __name__ == "__main__":
    main()
