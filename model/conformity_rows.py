"""Sets that push rows of a prompt through the network and compare logits, selections or routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batch import Segment, image_rows
from .caches import Caches
from .conformity import LOGITS_TOLERANCE, Comparison, Vectors, on_cpu
from .conformity_folder import Mode, VectorFolder, cache_formats
from .forward_pass import Recorder
from .network import Network

KVQ_ROWS_MIN = 0.95
"""Share of rows that quantised caches must leave within tolerance: float32 noise moves few values over a boundary."""
KVQ_ROWS_MIN_ON_GPU = 0.75
"""The same on a GPU, whose exponentials and sines differ in the last bit: a value that flips there changes every row
after its own."""
BF16_MEAN_MAX = 0.6
"""Mean difference of logits (of standard deviation 2) that bfloat16 may make; the reference differs from itself by up
to 0.28 if sums are ordered differently."""


@dataclass(slots=True)
class PromptRun:
    """One prompt on caches of its own. Layers run on all rows unless a floor is given (`Segment.floor`)."""

    network: Network
    mode: Mode
    ids: list[int]
    floor: int = 0
    slot: int = 0
    images: Mapping[int, Tensor] = field(default_factory=dict)
    """Where each image begins, and the rows of its span."""
    caches: Caches = field(init=False)

    def __post_init__(self) -> None:
        config, dtype = self.network.config, self.network.dtype
        self.caches = Caches.allocate(
            config,
            blocks=self.blocks,
            slots=2,
            formats=cache_formats(self.mode, dtype),
            dtype=torch.promote_types(dtype, torch.float32),
            device=self.network.device,
        )

    @property
    def blocks(self) -> int:
        return -(-len(self.ids) // self.network.config.block_tokens)

    def rows(
        self,
        start: int,
        end: int,
        *,
        window_start: int = 0,
        write_start: int = 0,
        logits_start: int | None = 0,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Compute the rows at positions start … end - 1 in one forward; their logits."""
        segment = self.segment(start, end, window_start, write_start, logits_start)
        return self.network.forward([segment], self.caches, recorder=on_cpu(recorder)).cpu()

    def segment(
        self, start: int, end: int, window_start: int = 0, write_start: int = 0, logits_start: int | None = 0
    ) -> Segment:
        lookback = max(self.network.config.engram_max_ngram_size - 1, 0)
        return Segment(
            slot=self.slot,
            block_table=range(self.blocks),
            start=start,
            token_ids=self.ids[start:end],
            history=self.ids[max(0, start - lookback) : start],
            floor=self.floor,
            window_start=window_start,
            write_start=write_start,
            logits_start=logits_start,
            images=image_rows(self.images.items(), start=start, end=end),
        )


def token_list(prompts: Vectors, name: str) -> list[int]:
    return [int(token) for token in prompts[name].tolist()]


def check_prefill(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """Whole prompts in one forward. `{prompt}.rows` tells which rows are stored if not all."""
    network, prompts = folder.network(mode), folder.prompts()
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for head in vectors.heads():
        ids = token_list(prompts, "decode" if head == "decode_prompt" else head)
        logits = PromptRun(network, mode, ids).rows(0, len(ids))
        if f"{head}.rows" in vectors:
            logits = logits[vectors[f"{head}.rows"].long()]
        pairs.append((head, logits, vectors[f"{head}.logits"]))
    compare_logits(c, pairs, mode, device=network.device)


def compare_logits(
    c: Comparison, pairs: Sequence[tuple[str, Tensor, Tensor]], mode: Mode, *, device: torch.device | None = None
) -> None:
    """(label, got, wanted) [rows, V] each, by the rule of the mode. `device`: where they were computed."""
    for label, got, wanted in pairs:
        if got.shape != wanted.shape:
            c.fail(f"{label}: shape {list(got.shape)}, not {list(wanted.shape)}")
            return
    if mode.rounded:
        for label, got, wanted in pairs:
            mean = float((got - wanted).abs().mean())
            c.note(f"{label}: mean difference {mean:.3f}")
            if not mean <= BF16_MEAN_MAX:
                c.fail(f"{label}: mean difference {mean:.3f} > {BF16_MEAN_MAX}")
    elif mode.quantised_caches:
        on_gpu = device is not None and device.type == "cuda"
        _compare_rows_with_flips(c, pairs, KVQ_ROWS_MIN_ON_GPU if on_gpu else KVQ_ROWS_MIN)
    else:
        for label, got, wanted in pairs:
            c.floats(label, got, wanted)


def _compare_rows_with_flips(c: Comparison, pairs: Sequence[tuple[str, Tensor, Tensor]], rows_min: float) -> None:
    """Rows are within tolerance until a rounding flips; `max_abs` is that of the rows without a flip."""
    differences = torch.cat([(got.double() - wanted.double()).abs().amax(dim=1) for _, got, wanted in pairs])
    close = differences <= LOGITS_TOLERANCE
    c.max_abs = float(differences[close].max()) if bool(close.any()) else None
    c.note(f"{int((~close).sum())} of {len(close)} rows flipped")
    share = float(close.double().mean())
    if not share >= rows_min:
        c.fail(f"only {share:.1%} of {len(close)} rows within {LOGITS_TOLERANCE:.0e}, {rows_min:.0%} wanted")


def check_decode(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """`split{s}`: s tokens of the prompt `decode` at once, then token by token; logits, and the caches at the end."""
    network, ids = folder.network(mode), token_list(folder.prompts(), "decode")
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for head in vectors.heads():
        split, wanted = int(head.removeprefix("split")), vectors[f"{head}.logits"]
        run = PromptRun(network, mode, ids[: split + len(wanted)])
        run.rows(0, split, logits_start=None)
        logits = torch.cat([run.rows(position, position + 1) for position in range(split, len(run.ids))])
        pairs.append((head, logits, wanted))
        compare_caches(c, run, vectors.below(f"{head}.cache."))
    compare_logits(c, pairs, mode, device=network.device)


def compare_caches(c: Comparison, run: PromptRun, wanted: Vectors) -> None:
    """`layer{l}.{array}` after all rows of the run. Quantised caches are compared through logits alone: one flipped
    code is a jump."""
    if run.mode.quantised_caches:
        return
    for name, array in wanted.arrays.items():
        layer, part = name.removeprefix("layer").split(".")
        c.floats(f"cache.{name}", cache_array(run, int(layer), part), array)


def cache_array(run: PromptRun, layer: int, part: str) -> Tensor:
    """A cache of the run in the layout of the vectors (`tests/golden/README.md`, "Conventions")."""
    caches, config, dtype = run.caches, run.network.config, run.network.dtype
    tokens, head = len(run.ids), config.head_dim
    if part == "window_ring":
        positions = torch.arange(max(0, tokens - config.window), tokens)
        ring = torch.zeros(config.window, head, dtype=dtype)
        rows = caches.windows[layer][run.slot].cpu()[positions % caches.ring_rows]
        ring[positions % config.window] = caches.formats.window.decode(rows, head, dtype)
        return ring
    ratio = config.ratio(layer)
    if part in ("partial_kv", "partial_score"):
        positions = torch.arange(tokens - tokens % ratio, tokens)
        partial = torch.zeros(ratio, head, dtype=caches.groups[layer].dtype)
        rows = caches.groups[layer][run.slot].cpu()[positions % caches.group_ring_rows]
        partial[positions % ratio] = rows[:, 0 if part == "partial_kv" else 1]
        return partial
    entries = tokens // ratio
    if part == "compressed_kv":
        return caches.formats.global_kv.decode(caches.global_kv[layer].flatten(0, 1)[:entries], head, dtype)
    if part == "index_keys":
        keys = caches.index_keys[layer].flatten(0, 1)[:entries]
        return caches.formats.index_key.decode(keys, config.index_head_dim, dtype)
    raise ValueError(f"no cache holds {part}")


def check_selection(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """`{prompt}.layer{l}.{index_rows, candidate_mask, expert_ids}`, exactly."""
    network, prompts = folder.network(mode), folder.prompts()
    for head in vectors.heads():
        ids, recorded = token_list(prompts, head), dict[str, Tensor]()
        PromptRun(network, mode, ids).rows(0, len(ids), recorder=recorded.__setitem__)
        for name, wanted in vectors.below(f"{head}.").arrays.items():
            compare_choice(c, f"{head}.{name}", recorded.get(name), wanted)


def compare_choice(c: Comparison, label: str, got: Tensor | None, wanted: Tensor) -> None:
    """`index_rows` are stored only as wide as the number of entries."""
    if got is None:
        c.fail(f"{label}: the network has no such value")
    else:
        c.equal(label, got[:, : wanted.shape[1]] if label.endswith("index_rows") else got, wanted)


def check_tail_exact(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """`exact.logits_last8`: the prompt `tail`, all rows everywhere."""
    ids = token_list(folder.prompts(), "tail")
    wanted = vectors["exact.logits_last8"]
    network = folder.network(mode)
    logits = PromptRun(network, mode, ids).rows(0, len(ids))
    compare_logits(c, [("last rows", logits[-len(wanted) :], wanted)], mode, device=network.device)


def check_tail_kept(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """`firstwin1.rows{R}`: from the last KV source's attention on, the last R rows only; the source sees its full
    window, layers above see no window row before."""
    network, ids = folder.network(mode), token_list(folder.prompts(), "tail")
    unit = vectors.below("firstwin1.")
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for head in unit.heads():
        rows, recorded = int(head.removeprefix("rows")), dict[str, Tensor]()
        run = PromptRun(network, mode, ids, floor=len(ids) - rows)
        logits = run.rows(0, len(ids), recorder=recorded.__setitem__)
        wanted = unit[f"{head}.logits"]
        pairs.append((head, logits[-len(wanted) :], wanted))
        if f"{head}.target_hidden_last" in unit and not mode.quantised_caches:
            c.floats(f"{head} taps", recorded["target_hidden"][-1], unit[f"{head}.target_hidden_last"])
    compare_logits(c, pairs, mode, device=network.device)


def check_tail_hit(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode, *, head: str) -> None:
    """`hit{n}.rows{R}`: entries of the first n tokens are given; rows from n - R on run through all layers and see no
    window row before n - R."""
    network, ids = folder.network(mode), token_list(folder.prompts(), "tail")
    boundary, unit = int(head.removeprefix("hit")), vectors.below(f"{head}.")
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for rows_head in unit.heads():
        start = boundary - int(rows_head.removeprefix("rows"))
        run = PromptRun(network, mode, ids)
        run.rows(0, boundary, logits_start=None)
        # Another slot: its rings hold nothing, as after a hit without a snapshot.
        run.slot, run.floor = 1, start
        logits = run.rows(start, len(ids), window_start=start, write_start=boundary, logits_start=boundary)
        pairs.append((rows_head, logits, unit[f"{rows_head}.logits"]))
    compare_logits(c, pairs, mode, device=network.device)
