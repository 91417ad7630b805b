"""Whalepod: a serving cluster for DeepSeek-V4.1-Flash.

The folders beside the repository's `src` are linked here, so that `whalepod.engine` is `engine/`.
Generated protobuf code lives in `whalepod.rpc`.
"""

__version__ = "0.1.0"
