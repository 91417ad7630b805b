"""`dspark` sets: what the target leaves for the drafter, and what the drafter makes of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .caches import Caches
from .conformity import Comparison, Vectors, on_cpu
from .conformity_folder import Mode, VectorFolder
from .conformity_rows import PromptRun, compare_logits, token_list
from .draft import Anchor
from .network import Network


def check_drafts(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """`prefill{S}`: S tokens of the prompt `decode` at once; then, at each `pos{p}`, the token there is run and the
    drafter guesses on from the target's greedy next token."""
    network, ids = folder.network(mode), token_list(folder.prompts(), "decode")
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for head in vectors.heads():
        unit, recorded = vectors.below(f"{head}."), dict[str, Tensor]()
        start = int(head.removeprefix("prefill"))
        positions = sorted(int(name.removeprefix("pos")) for name in unit.heads() if name.startswith("pos"))
        run = PromptRun(network, mode, ids[: positions[-1] + 1])
        run.rows(0, start, logits_start=None, recorder=recorded.__setitem__)
        if not mode.quantised_caches:
            c.floats(f"{head} taps", recorded["target_hidden"], unit["target_hidden"])
            _check_rings(c, unit, run, start)
        for position in positions:
            wanted, label = unit.below(f"pos{position}."), f"{head} pos{position}"
            c.equal(f"{label} token", torch.tensor(ids[position : position + 1]), wanted["token"])
            logits = run.rows(position, position + 1, recorder=recorded.__setitem__)
            # In bfloat16 the target's best two may change places: the drafter is asked about the vectors' one.
            token = int(wanted["output_ids"][0]) if mode.rounded else int(logits[-1].argmax())
            anchor = Anchor(run.slot, position + 1, token, window_start=run.floor)
            recorded |= draft_round(network, run.caches, anchor)
            pairs.append((label, recorded["base_logits"], wanted["base_logits"]))
            if not mode.quantised_caches:
                compare_round(c, label, recorded, wanted)
    compare_logits(c, pairs, mode, device=network.device)


def draft_round(network: Network, caches: Caches, anchor: Anchor) -> dict[str, Tensor]:
    """What one round makes of an anchor, by the names of the vectors."""
    drafter, values = network.drafter, dict[str, Tensor]()
    assert drafter is not None, "the checkpoint has no draft blocks"
    drafts = drafter.draft([anchor], caches, recorder=on_cpu(values.__setitem__))
    values["output_ids"] = torch.tensor([anchor.token_id, *drafts.ids[0].tolist()])
    if drafts.confidence is not None:
        values["confidence"] = drafts.confidence[0].cpu()
    return values


def compare_round(c: Comparison, label: str, got: Mapping[str, Tensor], wanted: Vectors) -> None:
    """`got`: a round's values and, where they are wanted, the taps of the rows before it as `target_hidden`."""
    c.equal(f"{label} output_ids", got["output_ids"], wanted["output_ids"])
    for name in ("base_logits", "markov_bias", "draft_hidden", "confidence"):
        c.floats(f"{label} {name}", got[name], wanted[name])
    if "target_hidden" in wanted:
        c.floats(f"{label} taps", got["target_hidden"][-1], wanted["target_hidden"])


def _check_rings(c: Comparison, unit: Vectors, run: PromptRun, tokens: int) -> None:
    """`block{j}.window_ring`: slot = position mod window; slots without a token are zero."""
    caches, config = run.caches, run.network.config
    positions = torch.arange(max(0, tokens - config.window), tokens)
    for block, windows in caches.draft_windows.items():
        ring = torch.zeros(config.window, config.head_dim, dtype=run.network.dtype)
        rows = windows[run.slot].cpu()[positions % caches.ring_rows]
        ring[positions % config.window] = caches.formats.window.decode(rows, config.head_dim, ring.dtype)
        c.floats(f"block{block}.window_ring", ring, unit[f"block{block}.window_ring"])
