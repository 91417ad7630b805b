"""A GGUF file of a tiny random Llama, written byte by byte as the format says; and that Llama in plain float64."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYERS, HEADS, KV_HEADS, WIDTH, FEED, VOCAB = 2, 4, 2, 16, 96, 320
EMBEDDING = HEADS * WIDTH
BASE, EPS = 100.0, 1e-5
F32, Q4_1, Q8_0 = 0, 3, 8
Array = NDArray[np.float64]


def q4_1(values: Array) -> tuple[bytes, Array]:
    """Bytes, and what they decode to."""
    blocks = values.reshape(-1, 32)
    least = blocks.min(1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(1, keepdims=True) - least) / 15).astype(np.float16)
    quanta = np.clip(np.rint((blocks - least) / scale), 0, 15).astype(np.uint8)
    packed = quanta[:, :16] | quanta[:, 16:] << 4
    data = b"".join(s.tobytes() + m.tobytes() + p.tobytes() for s, m, p in zip(scale, least, packed, strict=True))
    return data, (quanta * scale.astype(np.float64) + least).reshape(values.shape)


def q8_0(values: Array) -> tuple[bytes, Array]:
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    quanta = np.rint(blocks / scale).astype(np.int8)
    data = b"".join(s.tobytes() + q.tobytes() for s, q in zip(scale, quanta, strict=True))
    return data, (quanta * scale.astype(np.float64)).reshape(values.shape)


def f32(values: Array) -> tuple[bytes, Array]:
    return values.astype("<f4").tobytes(), values.astype(np.float32).astype(np.float64)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _entry(value: Any) -> bytes:
    match value:
        case list():
            kind = 8 if isinstance(value[0], str) else 5
            body = b"".join(_string(one) if kind == 8 else struct.pack("<i", one) for one in value)
            return struct.pack("<IIQ", 9, kind, len(value)) + body
        case float():
            return struct.pack("<If", 6, value)
        case _:
            return struct.pack("<II", 4, value)


def write_tiny_gguf(path: Path) -> dict[str, Array]:
    """Returns the weights as they decode."""
    draw = np.random.default_rng(3)
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "token_embd.weight": ((VOCAB, EMBEDDING), Q8_0),
        "output_norm.weight": ((EMBEDDING,), F32),
    }
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": ((EMBEDDING,), F32),
            f"blk.{i}.attn_q.weight": ((HEADS * WIDTH, EMBEDDING), Q4_1),
            f"blk.{i}.attn_k.weight": ((KV_HEADS * WIDTH, EMBEDDING), Q4_1),
            f"blk.{i}.attn_v.weight": ((KV_HEADS * WIDTH, EMBEDDING), Q4_1),
            f"blk.{i}.attn_output.weight": ((EMBEDDING, HEADS * WIDTH), Q4_1),
            f"blk.{i}.ffn_norm.weight": ((EMBEDDING,), F32),
            f"blk.{i}.ffn_gate.weight": ((FEED, EMBEDDING), Q4_1),
            f"blk.{i}.ffn_up.weight": ((FEED, EMBEDDING), Q4_1),
            f"blk.{i}.ffn_down.weight": ((EMBEDDING, FEED), Q4_1),
        }
    writers = {F32: f32, Q4_1: q4_1, Q8_0: q8_0}
    weights: dict[str, Array] = {}
    infos, data = b"", b""
    for name, (shape, kind) in shapes.items():
        raw, weights[name] = writers[kind](draw.normal(size=shape) * (0.2 if len(shape) > 1 else 1.0))
        data += b"\0" * (-len(data) % 32)
        infos += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", kind, len(data))
        data += raw
    pieces, kinds = _tokens()
    metadata = {
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.block_count": LAYERS,
        "llama.embedding_length": EMBEDDING,
        "llama.rope.freq_base": BASE,
        "llama.attention.layer_norm_rms_epsilon": EPS,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t h", "th e"],
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    head += b"".join(_string(name) + _entry(value) for name, value in metadata.items()) + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return weights


def _tokens() -> tuple[list[str], list[int]]:
    """The chat's marks, the 256 letters that stand for bytes, two merges, then words that nothing makes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in visible] + [chr(256 + i) for i in range(256 - len(visible))]
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<mark_{i}>" for i in range(14))]
    pieces = [*marks, *letters, "th", "the"]
    pieces += [f"word{'x' * i}" for i in range(VOCAB - len(pieces))]
    return pieces, [3] * len(marks) + [1] * (VOCAB - len(marks))


def next_logits(weights: dict[str, Array], ids: list[int]) -> Array:
    """[vocabulary]: what the Llama says after `ids`, one position at a time, head by head."""
    x = weights["token_embd.weight"][ids]
    for i in range(LAYERS):
        w = {name.split(".")[2]: value for name, value in weights.items() if name.startswith(f"blk.{i}.")}
        h = _normed(x, w["attn_norm"])
        q, k, v = ((h @ w[f"attn_{part}"].T).reshape(len(ids), -1, WIDTH) for part in "qkv")
        q, k = _turned(q), _turned(k)
        seen = np.zeros((len(ids), HEADS, WIDTH))
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            for at in range(len(ids)):
                scores = k[: at + 1, group] @ q[at, head] / WIDTH**0.5
                p = np.exp(scores - scores.max())
                seen[at, head] = p @ v[: at + 1, group] / p.sum()
        x = x + seen.reshape(len(ids), -1) @ w["attn_output"].T
        h = _normed(x, w["ffn_norm"])
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return _normed(x[-1], weights["output_norm.weight"]) @ weights["token_embd.weight"].T


def _normed(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def _turned(x: Array) -> Array:
    angles = np.arange(len(x))[:, None] * BASE ** (-np.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)
