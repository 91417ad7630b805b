"""`detail` sets: what every layer computes on the way, and what it leaves in the caches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .conformity import Comparison, Vectors, largest_difference
from .conformity_folder import Mode, VectorFolder
from .conformity_rows import PromptRun, compare_caches, compare_choice, compare_logits, token_list

CHOICES = ("expert_ids", "index_rows", "candidate_mask")
RELEASE_LAYER_SHARE = 0.04
"""Mean difference of a layer's output in bfloat16 with quantised activations, as a share of its mean magnitude."""


def check_detail(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """The prompt `detail` in one forward. In `release_bf16` each layer starts from the recorded output of the one
    before, because rounding alone moves what comes out at the end."""
    ids, recorded = token_list(folder.prompts(), "detail"), dict[str, Tensor]()
    run = PromptRun(folder.network(mode), mode, ids)
    if mode is Mode.RELEASE_BF16:
        _check_layer_by_layer(c, vectors, run)
        return
    recorded["logits"] = run.rows(0, len(ids), recorder=recorded.__setitem__)
    if mode.quantised_caches:
        _check_until_flip(c, vectors, recorded, mode, run.network.device)
        return
    for name, wanted in vectors.arrays.items():
        if name.startswith("cache."):
            continue
        if name.endswith(CHOICES):
            compare_choice(c, name, recorded.get(name), wanted)
        elif name in recorded:
            c.floats(name, recorded[name], wanted)
        else:
            c.fail(f"{name}: the network has no such value")
    compare_caches(c, run, vectors.below("cache."))


def _check_until_flip(
    c: Comparison, vectors: Vectors, recorded: Mapping[str, Tensor], mode: Mode, device: torch.device
) -> None:
    """A flipped rounding changes its row and later rows: choices must agree on the rows whose logits do."""
    compare_logits(c, [("logits", recorded["logits"], vectors["logits"])], mode, device=device)
    rows = (recorded["logits"] - vectors["logits"]).abs().amax(dim=1) <= 1e-4
    for name, wanted in vectors.arrays.items():
        if name.startswith("cache.") or name not in recorded:
            continue
        got = recorded[name][rows]
        if name.endswith(CHOICES):
            compare_choice(c, name, got, wanted[rows])
        else:
            c.floats(name, got, wanted[rows])


def _check_layer_by_layer(c: Comparison, vectors: Vectors, run: PromptRun) -> None:
    network = run.network
    with torch.inference_mode():
        state = network.begin([run.segment(0, len(run.ids))], run.caches)
        padding = state.streams.shape[0] - len(run.ids)
        for layer in network.layers:
            before = f"layer{layer.number - 1}"
            if layer.number > 0:
                state.streams = _padded(vectors[f"{before}.out"], padding).to(network.device, network.dtype)
                state.pre = _padded(vectors[f"{before}.pre_mix_next"], padding).to(state.pre)
            layer(state)
            _check_layer(c, layer.number, state.streams[: len(run.ids)].cpu(), vectors)


def _check_layer(c: Comparison, layer: int, streams: Tensor, vectors: Vectors) -> None:
    """Single values may jump where a quantiser or a near tie of experts flips; the mean does not."""
    wanted = vectors[f"layer{layer}.out"].float()
    share = float((streams.float() - wanted).abs().mean() / wanted.abs().mean())
    c.note(f"layer {layer}: {share:.1%}")
    if not share <= RELEASE_LAYER_SHARE:
        worst = largest_difference(streams.float(), wanted)
        c.fail(f"layer{layer}.out: mean difference {share:.1%} of its magnitude, largest {worst:.2e}")


def _padded(rows: Tensor, missing: int) -> Tensor:
    """Recorded rows with the last one repeated, as the network pads its own."""
    return torch.cat((rows, rows[-1:].expand(missing, *rows.shape[1:])))
