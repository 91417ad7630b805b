"""The model's configuration: the released nested `config.json`, flattened, checked, and with what follows from it.

Fields keep their released names. Everything the engine needs to know about a model's shape, its layers' roles and the
sizes of its state comes from here; none of it is a constant in code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from whalepod.core.errors import ConfigError

from .config_fields import read_fields
from .config_rules import check_config, last_at_or_below
from .engram_layout import EngramLayout, engram_layouts

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """`rope_scaling`: frequencies of slow pairs are divided by `factor` (layers with global KV only)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rope_type: str = "yarn"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How the files store weights: dense linears in E4M3 blocks, routed experts in `expert_dtype`."""

    weight_block_size: tuple[int, ...]
    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"


@dataclass(frozen=True, slots=True)
class VisionConfig:
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    rope_theta: float = 10000.0
    max_wh_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class WhalepodConfig:
    """Our own optional key `whalepod` in config.json; other loaders ignore it."""

    block_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary frequencies of one kind of layer. Pair i turns by position · w_i, w_i = theta^(-2i / dim); with YaRN,
    w_i is divided by `factor` in the share clamp((i - low) / (high - low), 0, 1)."""

    dim: int
    theta: float
    factor: float = 1.0
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checked configuration. Read it with `from_dir` or `from_json`; both raise ConfigError naming the bad field."""

    # Whole model.
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-20
    dtype: str = "bfloat16"
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    tie_word_embeddings: bool = False

    # Attention.
    num_attention_heads: int
    num_key_value_heads: int = 1
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    attention_bias: bool = False
    q_head_norm: bool = False
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: YarnConfig | None = None

    # Global KV and its indexer.
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int

    # Experts.
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hidden_act: str = "silu"
    n_group: int | None = None
    topk_group: int | None = None

    # Residual streams.
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    hc_pre_from_prev_sublayer: bool = True

    # N-gram memory.
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0

    # Drafter. `num_nextn_predict_layers` counts its blocks; `dspark_block_size` the tokens drafted in a round.
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_markov_head_type: str = "vanilla"
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    vision_config: VisionConfig | None = None
    quantization_config: QuantizationConfig | None = None
    whalepod: WhalepodConfig = WhalepodConfig()

    engram: tuple[EngramLayout, ...] = field(init=False, compare=False, repr=False)
    """Primes, offsets and multipliers of each layer of `engram_layer_ids`."""

    def __post_init__(self) -> None:
        layouts = engram_layouts(
            self.engram_layer_ids,
            vocab_size=self.engram_vocab_size,
            max_ngram_size=self.engram_max_ngram_size,
            n_heads=self.engram_n_heads,
            compressed_vocab_size=self.engram_compressed_vocab_size,
        )
        object.__setattr__(self, "engram", layouts)
        check_config(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From the parsed nested `config.json`. `text_config` overrides the top level; unknown keys are ignored."""
        text = values.get("text_config") or {}
        if not isinstance(text, Mapping):
            raise ConfigError("config.json: text_config must be an object")
        flat = {**values, **text, "dtype": values.get("dtype", values.get("torch_dtype"))}
        return cls(**read_fields(cls, flat, where=""))

    @classmethod
    def from_dir(cls, directory: Path | str) -> Self:
        """From `config.json` in a checkpoint directory."""
        path = Path(directory) / CONFIG_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist: is this a checkpoint directory?") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold one JSON object")
        return cls.from_json(values)

    # Sizes of state (`docs/architecture.md`).

    @property
    def window(self) -> int:
        """W: a row sees this many window rows, itself included."""
        return self.sliding_window

    @property
    def kept_rows(self) -> int:
        """K: the last rows of a prompt that run through the layers above the last KV source."""
        return self.sliding_window + 2 * (self.dspark_block_size + 1)

    def check_kept_rows(self, wanted: int | None) -> None:
        """Raises ConfigError if this model keeps another number of rows. None: any is fine."""
        if wanted not in (None, self.kept_rows):
            raise ConfigError(
                f"engine.kept_rows (DEEPINFER_YOCO_PREFILL_KEEP_TOKENS) is {wanted}, but this model keeps "
                f"{self.kept_rows} rows: a window of {self.window}, and {self.kept_rows - self.window} to take back "
                f"two drafts of {self.dspark_block_size}. Leave it unset"
            )

    @property
    def group_tokens(self) -> int:
        """R0: least common multiple of the sources' ratios. At its multiples no source has an unfinished group."""
        return math.lcm(*(self.compress_ratios[source] for source in self.kv_source_layer_ids))

    @property
    def block_tokens(self) -> int:
        """B: tokens of a block. `whalepod.block_tokens` if given; else 256 for windows of at least 128 rows and 16
        for smaller ones, rounded up to a multiple of `group_tokens`."""
        if self.whalepod.block_tokens is not None:
            return self.whalepod.block_tokens
        tokens = 256 if self.sliding_window >= 128 else 16
        return -(-tokens // self.group_tokens) * self.group_tokens

    def floor(self, prompt_tokens: int) -> int:
        """First row that runs above the last KV source, for a prompt of L tokens: max(0, L - K)."""
        return max(0, prompt_tokens - self.kept_rows)

    def halo_rows(self, *, boundary: int, floor: int) -> int:
        """Rows to replay before `boundary` so that what follows is exact, when global KV is given but no window is.

        Every layer up to the last KV source widens the reach by W - 1 rows; the source itself counts only as far as
        its window, read from `floor` on, reaches below `boundary`. Replay from 0 is always exact.
        """
        reach = self.sliding_window - 1
        own = min(reach, max(0, reach - (floor - boundary)))
        return min(boundary, self.last_kv_source * reach + own)

    # Roles of layers. Layer ids from `num_hidden_layers` on are the draft blocks.

    @property
    def last_kv_source(self) -> int:
        """The layer whose attention, and all above it, runs on the kept rows only."""
        return self.kv_source_layer_ids[-1]

    def ratio(self, layer: int) -> int:
        """Tokens per entry of the global KV this layer reads; 0: window only."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose global KV this layer reads, None for window-only layers."""
        return last_at_or_below(self.kv_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection this layer attends to, None for window-only layers."""
        return last_at_or_below(self.index_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def engram_layout(self, layer: int) -> EngramLayout | None:
        """The n-gram table in front of this layer, None if it has none."""
        return self.engram[self.engram_layer_ids.index(layer)] if layer in self.engram_layer_ids else None

    def rope(self, layer: int) -> RopeParameters:
        """Rotary parameters of everything this layer rotates: queries, window rows, entries, index keys and queries."""
        if self.compress_ratios[layer] == 0:
            return RopeParameters(dim=self.qk_rope_head_dim, theta=self.rope_theta)
        return self._compressed_rope()

    def _compressed_rope(self) -> RopeParameters:
        dim, theta, yarn = self.qk_rope_head_dim, self.compress_rope_theta, self.rope_scaling
        if yarn is None:
            return RopeParameters(dim=dim, theta=theta)

        def pair_that_turns(times: float) -> float:
            """Index of the pair that makes so many full turns over the original context."""
            return dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
        # The reference widens an empty range so that the ramp stays finite.
        return RopeParameters(dim, theta, yarn.factor, float(low), float(high) if high != low else low + 0.001)
