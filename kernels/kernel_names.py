"""What a compiled kernel is called, so that another process finds it in Triton's cache.

Triton makes a kernel's name of its source, of the functions that it calls, and of the constants that all of these use.
But it collects the constants of a called function before it has named that function: they are in the kernel's name only
if something else, launched before, had the function named already (3.6 and 3.7, `DependenciesFinder._update_hash`). So
what one process has compiled, another that launches in another order would compile again.

It also sorts constants of one name by where their modules lie in memory. So two modules whose functions one kernel
calls name their constants differently.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def name_by_source() -> None:
    """From here on the names that this process gives depend on sources alone. Before the first launch; idempotent. Does
    nothing without Triton."""
    if find_spec("triton") is None:
        return
    from triton.runtime.jit import DependenciesFinder  # noqa: PLC0415  an optional dependency

    finder: Any = DependenciesFinder
    if finder._update_hash is not _update_hash:
        _original.append(finder._update_hash)
        finder._update_hash = _update_hash


_original: list[Any] = []


def _update_hash(finder: Any, called: Any) -> None:  # noqa: ANN401  Triton's
    _ = called.cache_key  # named first
    _original[0](finder, called)
