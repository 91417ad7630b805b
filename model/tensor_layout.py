"""Which tensors a checkpoint of a configuration holds: names, shapes, how they may be stored, and who needs them.

Names have no `model.` prefix. A quantised tensor `x.weight` comes with `x.scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .config import ModelConfig
from .weight_formats import FP4_GROUP


class ModelRole(Enum):
    """What a rank loads (`docs/architecture.md`)."""

    FULL = "full"
    """The text model and its drafter."""
    ENCODER = "encoder"
    """The layers below the last KV source, and what that layer needs to write window, global and index rows."""


class Storage(Enum):
    """How a quantised checkpoint stores a tensor. Any tensor may also be stored plain, as floats without a scale."""

    PLAIN = "plain"
    FP8_BLOCKS = "fp8 blocks"
    FP8_ROWS = "fp8 rows"
    MXFP4 = "mxfp4"


class Part(Enum):
    TEXT = "text"
    DRAFT = "draft"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `shape` is the shape of its values, not of packed codes."""

    name: str
    shape: tuple[int, ...]
    storage: Storage = Storage.PLAIN
    float32: bool = False
    """Kept in at least float32 whatever the model computes in: mixing coefficients, sinks, routing biases."""

    @property
    def part(self) -> Part:
        top = self.name.split(".", 1)[0]
        if top == "mtp":
            return Part.DRAFT
        return Part.VISION if top in ("vision", "aligner") or top.startswith("image_") else Part.TEXT

    @property
    def expert(self) -> tuple[str, int] | None:
        """Prefix of the layer's or draft block's experts and the routed expert that it belongs to, if it does."""
        prefix, experts, rest = self.name.partition("experts.")
        return (prefix, int(rest.split(".", 1)[0])) if experts and prefix.endswith(".ffn.") else None

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix("weight") + "scale"

    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the stored codes: packed experts hold two columns a byte."""
        return (self.shape[0], self.shape[1] // 2) if self.storage is Storage.MXFP4 else self.shape

    def scale_shape(self, block: tuple[int, int]) -> tuple[int, ...]:
        rows, columns = self.shape
        if self.storage is Storage.FP8_BLOCKS:
            return (-(-rows // block[0]), -(-columns // block[1]))
        return (rows, columns // FP4_GROUP)


# What the last KV source needs to write its rows. Its queries, output, experts and mixing coefficients come after.
_PRODUCERS = (
    "attn_norm.",
    "attn.wkv.",
    "attn.kv_norm.",
    "attn.compressor.",
    "attn.indexer.wk.",
    "attn.indexer.k_norm.",
)


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor of a checkpoint, vision included, without scales."""
    width, vocab = config.hidden_size, config.vocab_size
    specs = [
        TensorSpec("embed.weight", (vocab, width)),
        TensorSpec("head.weight", (vocab, width)),
        TensorSpec("norm.weight", (width,)),
    ]
    for layer in range(config.num_hidden_layers):
        specs += _layer(config, f"layers.{layer}.", config.n_routed_experts)
        specs += _global_kv(config, layer)
        specs += _engram(config, layer)
    for block in range(config.num_nextn_predict_layers):
        specs += _layer(config, f"mtp.{block}.", config.dspark_n_routed_experts)
    specs += _drafter(config)
    specs += _vision(config)
    return specs


def specs_for_role(config: ModelConfig, role: ModelRole) -> list[TensorSpec]:
    """The tensors that a rank of this role reads."""
    text = [spec for spec in tensor_specs(config) if spec.part is not Part.VISION]
    return text if role is ModelRole.FULL else [spec for spec in text if _encoder_needs(config, spec)]


def vision_specs(config: ModelConfig) -> list[TensorSpec]:
    """The tensors of the vision encoder; none if the model has none."""
    return list(_vision(config))


def stored_names(config: ModelConfig) -> set[str]:
    """Every name that may occur in a checkpoint: values and, where it is quantised, scales."""
    specs = tensor_specs(config)
    names = {spec.name for spec in specs}
    if config.quantization_config is not None:
        names |= {spec.scale_name for spec in specs if spec.storage is not Storage.PLAIN}
    return names


def _encoder_needs(config: ModelConfig, spec: TensorSpec) -> bool:
    if not spec.name.startswith("layers."):
        return spec.name == "embed.weight"
    _, number, rest = spec.name.split(".", 2)
    layer = int(number)
    if layer == config.last_kv_source:
        return rest.startswith((*_PRODUCERS, "engram."))
    return layer < config.last_kv_source


def _layer(config: ModelConfig, prefix: str, experts: int) -> Iterator[TensorSpec]:
    """What every layer and every draft block has."""
    yield from _attention(config, f"{prefix}attn.")
    width, mixed = config.hidden_size, config.hc_mult * config.hidden_size
    coefficients = config.hc_mult * (config.hc_mult + 2)
    yield TensorSpec(f"{prefix}attn_norm.weight", (width,))
    yield TensorSpec(f"{prefix}ffn_norm.weight", (width,))
    for sublayer in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}hc_{sublayer}_fn", (coefficients, mixed), float32=True)
        yield TensorSpec(f"{prefix}hc_{sublayer}_base", (coefficients,), float32=True)
        yield TensorSpec(f"{prefix}hc_{sublayer}_scale", (3,), float32=True)
    yield TensorSpec(f"{prefix}ffn.gate.weight", (experts, width))
    yield TensorSpec(f"{prefix}ffn.gate.bias", (experts,), float32=True)
    yield TensorSpec(f"{prefix}ffn.gate.bias_vl", (experts,), float32=True)
    inner = config.moe_intermediate_size
    yield from _expert(f"{prefix}ffn.shared_experts.", width, inner * config.n_shared_experts, Storage.FP8_BLOCKS)
    for expert in range(experts):
        yield from _expert(f"{prefix}ffn.experts.{expert}.", width, inner, Storage.MXFP4)


def _attention(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    width, head, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    out_rank = config.o_groups * config.o_lora_rank
    yield TensorSpec(f"{prefix}wq_a.weight", (config.q_lora_rank, width), Storage.FP8_BLOCKS)
    yield TensorSpec(f"{prefix}wq_b.weight", (heads * head, config.q_lora_rank), Storage.FP8_BLOCKS)
    yield TensorSpec(f"{prefix}wkv.weight", (head, width), Storage.FP8_BLOCKS)
    yield TensorSpec(f"{prefix}wo_a.weight", (out_rank, heads * head // config.o_groups), Storage.FP8_BLOCKS)
    yield TensorSpec(f"{prefix}wo_b.weight", (width, out_rank), Storage.FP8_BLOCKS)
    yield TensorSpec(f"{prefix}q_norm.weight", (config.q_lora_rank,))
    yield TensorSpec(f"{prefix}kv_norm.weight", (head,))
    yield TensorSpec(f"{prefix}attn_sink", (heads,), float32=True)


def _expert(prefix: str, width: int, inner: int, storage: Storage) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}w1.weight", (inner, width), storage)
    yield TensorSpec(f"{prefix}w2.weight", (width, inner), storage)
    yield TensorSpec(f"{prefix}w3.weight", (inner, width), storage)


def _global_kv(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Compressor and index keys of KV sources, index queries of index sources."""
    prefix, head, keys = f"layers.{layer}.attn.", config.head_dim, config.index_head_dim
    if layer in config.kv_source_layer_ids:
        yield TensorSpec(f"{prefix}compressor.wkv.weight", (head, config.hidden_size))
        if config.ratio(layer) > 1:
            yield TensorSpec(f"{prefix}compressor.wgate.weight", (head, config.hidden_size))
        yield TensorSpec(f"{prefix}compressor.norm.weight", (head,))
        yield TensorSpec(f"{prefix}indexer.wk.weight", (keys, head))
        yield TensorSpec(f"{prefix}indexer.k_norm.weight", (keys,))
    if layer in config.index_source_layer_ids:
        heads = config.index_n_heads
        yield TensorSpec(f"{prefix}indexer.wq_b.weight", (heads * keys, config.q_lora_rank), Storage.FP8_BLOCKS)
        yield TensorSpec(f"{prefix}indexer.weights_proj.weight", (heads, config.hidden_size))


def _engram(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    layout = config.engram_layout(layer)
    if layout is None:
        return
    prefix, width, streams = f"layers.{layer}.engram.", config.hidden_size, config.hc_mult
    yield TensorSpec(f"{prefix}embed.weight", (layout.rows, config.engram_head_dim), Storage.FP8_ROWS)
    columns = len(layout.primes) * config.engram_head_dim
    yield TensorSpec(f"{prefix}wkv.weight", ((streams + 1) * width, columns), Storage.FP8_BLOCKS)
    yield TensorSpec(f"{prefix}q_weight", (streams, width))
    yield TensorSpec(f"{prefix}k_weight", (streams, width))


def _drafter(config: ModelConfig) -> Iterator[TensorSpec]:
    """What only the first and the last draft block have."""
    blocks = config.num_nextn_predict_layers
    if blocks == 0:
        return
    width, vocab, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
    taps = width * len(config.dspark_target_layer_ids)
    yield TensorSpec("mtp.0.main_proj.weight", (width, taps), Storage.FP8_BLOCKS)
    yield TensorSpec("mtp.0.main_norm.weight", (width,))
    last = f"mtp.{blocks - 1}."
    yield TensorSpec(f"{last}norm.weight", (width,))
    yield TensorSpec(f"{last}markov_head.embed.weight", (vocab, rank))
    yield TensorSpec(f"{last}markov_head.head.weight", (vocab, rank))
    if config.enable_confidence_head:
        inputs = width + (rank if config.confidence_head_with_markov else 0)
        yield TensorSpec(f"{last}confidence_head.proj.weight", (1, inputs))


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    vision = config.vision_config
    if vision is None:
        return
    inner, width, mlp = vision.hidden_size, config.hidden_size, vision.intermediate_size
    yield TensorSpec("vision.patch_embed.proj.weight", (inner, 3 * vision.patch_size**2))
    yield TensorSpec("vision.patch_embed.proj.bias", (inner,))
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        yield TensorSpec(f"{prefix}norm1.weight", (inner,))
        yield TensorSpec(f"{prefix}attn.wqkv.weight", (3 * inner, inner))
        yield TensorSpec(f"{prefix}attn.wqkv.bias", (3 * inner,))
        yield TensorSpec(f"{prefix}attn.wo.weight", (inner, inner))
        yield TensorSpec(f"{prefix}attn.wo.bias", (inner,))
        yield TensorSpec(f"{prefix}norm2.weight", (inner,))
        yield TensorSpec(f"{prefix}mlp.w1.weight", (2 * mlp, inner))
        yield TensorSpec(f"{prefix}mlp.w2.weight", (inner, mlp))
    yield TensorSpec("vision.norm.weight", (inner,))
    yield TensorSpec("aligner.w1.weight", (width, inner * vision.downsample_ratio**2))
    yield TensorSpec("aligner.w1.bias", (width,))
    yield TensorSpec("aligner.w2.weight", (width, width))
    yield TensorSpec("aligner.w2.bias", (width,))
    for mark in ("image_start", "image_end", "image_newline"):
        yield TensorSpec(mark, (width,))
