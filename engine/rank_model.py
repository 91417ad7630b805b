"""The model as one rank holds it: weights of its role, and what the rest of the engine must know about its state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from whalepod.kvstore.value_format import BlockLayout
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import ModelRole


@dataclass(frozen=True, slots=True)
class RankModel:
    """Ready to run. `namespace` and `block_layout` are what a `KvClient` of this rank is built with."""

    config: ModelConfig
    role: ModelRole
    block_tokens: int
    namespace: bytes
    """16 bytes: ranks whose state is interchangeable agree on it (`kvstore.md` §2.1)."""
    layout: str
    """What is behind `namespace`, readable."""
    block_layout: BlockLayout

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        role: ModelRole = ModelRole.FULL,
        block_tokens: int | None = None,
        quantized_caches: bool = True,
        threads: int = 1,
    ) -> Self:
        """Read the weights of `role`. `block_tokens` None: the model's. Results do not depend on `threads`.

        Raises ConfigError or CheckpointError.
        """
        raise NotImplementedError
