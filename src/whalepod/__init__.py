"""Whalepod: a serving cluster for DeepSeek-V4.1-Flash.

The folders beside the repository's `src` are linked here, so that `whalepod.engine` is `engine/`.
Generated protobuf code lives in `whalepod.rpc`. `LLM` and `SamplingParams` are the offline interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whalepod.engine.llm import LLM
    from whalepod.engine.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The offline interface is imported when it is asked for: everything else must start without torch."""
    if name == "LLM":
        from whalepod.engine.llm import LLM  # noqa: PLC0415

        return LLM
    if name == "SamplingParams":
        from whalepod.engine.sampling_params import SamplingParams  # noqa: PLC0415

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
