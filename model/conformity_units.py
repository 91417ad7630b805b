"""`units.safetensors`: operations checked one by one, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from whalepod.kernels.activation import swiglu
from whalepod.kernels.attention import sink_attention
from whalepod.kernels.indexer import candidate_mask
from whalepod.kernels.linear import linear
from whalepod.kernels.mhc import split_mixes, spread_scale
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat
from whalepod.kernels.rms_norm import rms_norm
from whalepod.kernels.rope import rotary_angles
from whalepod.kernels.router import route

from .config import RopeParameters
from .conformity import Comparison, SetResult, Status, Vectors, compare
from .engram import hash_rows
from .engram_layout import engram_layouts
from .rotary import RotaryAngles, rotary_frequencies
from .weight_formats import decode_fp8_blocks, decode_mxfp4

UNIT_TOLERANCE = 1e-5
"""One operation in float32."""


def run_unit_sets(path: Path, name: str) -> Iterator[SetResult]:
    vectors = Vectors.load(path)
    for head in vectors.heads():
        label = f"{name} {head}"
        check = CHECKS.get(head)
        if check is None:
            yield SetResult(label, Status.FAILED, detail="no check knows this group of vectors")
        else:
            yield compare(label, lambda c, run=check: run(c, vectors))


def _check_quant(c: Comparison, vectors: Vectors) -> None:
    formats: dict[str, tuple[PackedFormat, str, str]] = {
        "fp8_block32": (FP8_BLOCK32, "codes", "scale_e8m0"),
        "fp4_block16_e4m3": (FP4_BLOCK16, "packed", "scale"),
        "fp4_block32_e8m0": (MXFP4_BLOCK32, "packed", "scale"),
    }
    x = vectors["quant.input_bf16"]
    for name, (packed, codes, scale) in formats.items():
        wanted = vectors.below(f"quant.{name}.")
        records = packed.encode(x)
        c.equal(f"{name} of float32", packed.encode(x.float()), records)
        split = wanted[codes].shape[1]
        c.equal(f"{name} codes", records[:, :split], wanted[codes])
        c.equal(f"{name} scales", records[:, split:], wanted[scale])
        values = packed.decode(records, x.shape[1], torch.float32)
        c.floats(f"{name} values", values, wanted["dequant_bf16"].float(), tolerance=0.0)


def _check_weight_formats(c: Comparison, vectors: Vectors) -> None:
    fp8, fp4 = vectors.below("wq.fp8_32x32."), vectors.below("wq.mxfp4.")
    c.floats("fp8", decode_fp8_blocks(fp8["codes"], fp8["scale"], (32, 32)), fp8["dequant"], tolerance=0.0)
    c.floats("mxfp4", decode_mxfp4(fp4["packed"], fp4["scale"]), fp4["dequant"], tolerance=0.0)


def _check_gemm(c: Comparison, vectors: Vectors) -> None:
    """Activations are quantised per 32 channels. The reference adds one group of 32 after the other into a bfloat16
    result; a sum in float32 may differ by those roundings."""
    x = FP8_BLOCK32.round_trip(vectors["gemm.input_bf16"].float())
    for name, weight in (("fp8", vectors["wq.fp8_32x32.dequant"]), ("fp4", vectors["wq.mxfp4.dequant"])):
        c.roughly(name, linear(x, weight), vectors[f"gemm.{name}_out_bf16"].float(), share=2.0**-7)


def _check_attention(c: Comparison, vectors: Vectors) -> None:
    unit = vectors.below("attn.")
    index = unit["idx"][0].long()
    keys = unit["kv"][0][index.clamp(min=0)]
    got = sink_attention(unit["q"][0], keys, index >= 0, unit["sink"], scale=64**-0.5)
    c.floats("float32", got, unit["out_f32"][0], tolerance=UNIT_TOLERANCE)
    got = sink_attention(unit["q"][0].bfloat16(), keys.bfloat16(), index >= 0, unit["sink"], scale=64**-0.5)
    c.roughly("bfloat16", got.float(), unit["out_bf16"][0].float(), share=2.0**-7)


def _check_mixes(c: Comparison, vectors: Vectors) -> None:
    unit = vectors.below("mhc.")
    streams = unit["iters1.comb"].shape[-1]
    scale = spread_scale(unit["scale"], streams)
    for head in unit.heads():
        if not head.startswith("iters"):
            continue
        iterations = int(head.removeprefix("iters"))
        eps = 1e-5 if iterations == 12 else 1e-6
        got = split_mixes(unit["mixes"], scale, unit["base"], eps=eps, iterations=iterations)
        for part in ("pre", "post", "comb"):
            c.floats(f"{head} {part}", getattr(got, part), unit[f"{head}.{part}"], tolerance=UNIT_TOLERANCE)


def _check_rope(c: Comparison, vectors: Vectors) -> None:
    unit = vectors.below("rope.")
    kinds = {
        "window": RopeParameters(dim=64, theta=10000.0),
        "compressed": RopeParameters(dim=64, theta=160000.0, factor=16.0, low=15.0, high=25.0),
    }
    for name, parameters in kinds.items():
        frequencies = rotary_frequencies(parameters, torch.float32)
        c.floats(f"{name} frequencies", frequencies, unit[f"{name}.freqs_at_pos1"], tolerance=1e-7)
        cos, sin = rotary_angles(unit["positions"], frequencies)
        c.floats(f"{name} cos", cos, unit[f"{name}.cos"], tolerance=UNIT_TOLERANCE)
        c.floats(f"{name} sin", sin, unit[f"{name}.sin"], tolerance=UNIT_TOLERANCE)
    positions = torch.arange(7, 12)
    angles = RotaryAngles.at(positions, rotary_frequencies(kinds["compressed"], torch.float32))
    turned, back = angles.rotate(unit["apply.in"]), angles.rotate_back(unit["apply.pos7to11"])
    c.floats("rotate", turned, unit["apply.pos7to11"], tolerance=UNIT_TOLERANCE)
    c.floats("rotate back", back, unit["apply.inverse_of_that"], tolerance=UNIT_TOLERANCE)


def _check_candidates(c: Comparison, vectors: Vectors) -> None:
    unit = vectors.below("cand.")
    for name, wanted in unit.arrays.items():
        decode = name.startswith("decode")
        settings = name.removeprefix(name.split(".")[0] + ".") if decode else name
        if not settings.startswith("top"):
            continue
        top, block = (int("".join(filter(str.isdigit, part))) for part in settings.split("_"))
        entries = int(name.split(".")[0].removeprefix("decode")) if decode else unit["scores"].shape[1]
        scores = unit["scores"][-1:, :entries] if decode else unit["scores"]
        visible = torch.tensor([entries]) if decode else unit["visible"].long()
        c.equal(name, candidate_mask(scores, visible, block=block, top_blocks=top), wanted)


def _check_router(c: Comparison, vectors: Vectors) -> None:
    unit = vectors.below("router.")
    ids, weights = route(unit["x"], unit["weight"], unit["bias"], chosen=3, factor=1.5)
    c.equal("ids", ids, unit["ids"])
    c.floats("weights", weights, unit["weights"], tolerance=UNIT_TOLERANCE)


def _check_rms_norm(c: Comparison, vectors: Vectors) -> None:
    unit = vectors.below("rmsnorm.")
    for name, wanted in unit.arrays.items():
        if name.startswith("out_eps"):
            got = rms_norm(unit["in"], unit["weight"], eps=float(name.removeprefix("out_eps")))
            c.floats(name, got, wanted, tolerance=UNIT_TOLERANCE)


def _check_swiglu(c: Comparison, vectors: Vectors) -> None:
    unit = vectors.below("swiglu.")
    for name, wanted in unit.arrays.items():
        if name.startswith("limit"):
            got = swiglu(unit["gate"], unit["up"], limit=float(name.removeprefix("limit")))
            c.floats(name, got, wanted, tolerance=UNIT_TOLERANCE)


def _check_released_ngram(c: Comparison, vectors: Vectors) -> None:
    """The released tables: layers 1 and 14, sizes 2 to 4, 8 heads."""
    unit = vectors.below("released_ngram.")
    layouts = engram_layouts((1, 14), vocab_size=16_000_000, max_ngram_size=4, n_heads=8, compressed_vocab_size=99092)
    ids = unit["compressed_ids"]
    lookback = torch.stack([torch.cat((ids.new_full((s,), -1), ids[: len(ids) - s])) for s in range(4)], dim=1)
    for index, layout in enumerate(layouts):
        c.equal("primes", torch.tensor(layout.primes), unit["primes"][index].flatten())
        c.equal("offsets", torch.tensor(layout.offsets), unit["offsets"][index])
        c.equal("multipliers", torch.tensor(layout.multipliers), unit["multipliers"][index])
        c.equal("rows", hash_rows(lookback, layout, pad_id=2), unit["rows_pad2"][:, index])


CHECKS: dict[str, Callable[[Comparison, Vectors], None]] = {
    "quant": _check_quant,
    "wq": _check_weight_formats,
    "gemm": _check_gemm,
    "attn": _check_attention,
    "mhc": _check_mixes,
    "rope": _check_rope,
    "cand": _check_candidates,
    "router": _check_router,
    "rmsnorm": _check_rms_norm,
    "swiglu": _check_swiglu,
    "released_ngram": _check_released_ngram,
}
