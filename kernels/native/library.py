"""The compiled half of the kernels on a CPU: `operators.c`, if the installation could build it.

    kernels/<op>/__init__.py ── library.takes(…)? ──▶ kernels/<op>/native.py ──▶ operators (no interpreter, no lock)
                                      └─ no ──▶ kernels/<op>/reference.py

Its results have the same bits for any rows beside a row and on any processor, but other bits than the reference: which
of the two a process takes is part of how it calculates (`engine/rank_model.py`), and ranks compare that.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback

NUMERICS = 1
"""As in `operators.c`: a library that calculates otherwise is of another version of Whalepod."""

PATH = Path(__file__).with_name(f"_operators{sysconfig.get_config_var('EXT_SUFFIX')}")

_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "linear": "pppnnnn",
    "index_scores": "ppppnnnn",
    "rms_norm": "pppnnf",
    "rotate": "ppppnnn",
    "pool_groups": "pppnnn",
    "split_mixes": "ppppppnnfn",
    "predict_mixes": "ppppppppnnnffn",
    "collapse": "pppnnn",
    "expand": "pppppnnn",
    "let_in": "ppppppnnnff",
    "encode": "ppnnnnnnf",
    "decode": "ppnnnnnn",
    "round_trip": "ppnnnnnf",
    "dense_expert": "ppppnnnfnnnf",
    "expert_pairs": "ppppppnnnnnfnnnf",
    "attention": "pppppnnnnf",
    "route": "ppppnnnnff",
    "select_top": "pppnnn",
    "candidate_mask": "pppnnnn",
}
"""Operator -> its arguments: pointers, numbers, floats."""
_MAY_FAIL = frozenset({"index_scores", "dense_expert", "expert_pairs", "attention", "select_top", "candidate_mask"})


Operator = Callable[..., object]


def load() -> tuple[dict[str, Operator], str | None]:
    """The operators by name, or none and why."""
    if not PATH.exists():
        return {}, "no C compiler built them here"
    try:
        if _is_older_than_sources():
            return {}, f"{PATH.name} is older than its sources: run `make venv`"
        library = ctypes.CDLL(str(PATH))
        if library.whalepod_numerics() != NUMERICS:
            return {}, f"{PATH.name} was built from other sources: run `make venv`"
        if not library.whalepod_runs_here():
            return {}, "this processor has no AVX2 and FMA"
        return {name: _declared(library, name) for name in _SIGNATURES}, None
    except (OSError, AttributeError) as error:
        return {}, f"{PATH.name} cannot be loaded ({error})"


def _is_older_than_sources() -> bool:
    """In a checkout, whose sources lie beside the library; an installed package has none."""
    sources = [*PATH.parent.glob("*.c"), *PATH.parent.glob("*.h")]
    return any(source.stat().st_mtime > PATH.stat().st_mtime for source in sources)


def _declared(library: ctypes.CDLL, name: str) -> Operator:
    function = getattr(library, f"whalepod_{name}")
    function.argtypes = argument_types(name)
    function.restype = ctypes.c_int if name in _MAY_FAIL else None
    if name in _MAY_FAIL:
        function.errcheck = _raise_unless_done
    return function


def argument_types(name: str) -> list[Any]:
    """As ctypes calls them."""
    return [_TYPES[letter] for letter in _SIGNATURES[name]]


def _raise_unless_done(done: int, *_: object) -> None:
    if not done:
        raise MemoryError("an operator got no memory to work in, or a number that names nothing")


_OPERATORS, REASON_MISSING = load()


class _Switch:
    on = bool(_OPERATORS)
    wanted = True


def operator(name: str) -> Operator:
    """One of them; without a library, something that is never called."""
    assert name in _SIGNATURES, name
    return _OPERATORS.get(name, _is_missing)


def _is_missing(*_: object) -> None:
    raise RuntimeError("the compiled operators are not there: who called this did not ask `takes`")


def available() -> bool:
    """Whether they can run here at all."""
    return bool(_OPERATORS)


def in_use() -> bool:
    """Whether this process calculates float32 on a CPU with them."""
    return _Switch.on


def choose(*, wanted: bool) -> None:
    """For the whole process, before anything is calculated: its results change. Without a call they are wanted."""
    _Switch.wanted, _Switch.on = wanted, wanted and bool(_OPERATORS)


def decide(*, wanted: bool | None) -> None:
    """`choose`, or None: as it is. Says once, and counts, that the operators are wanted here and not there."""
    if wanted is not None:
        choose(wanted=wanted)
    if _Switch.wanted and REASON_MISSING is not None:
        note_fallback("cpu_operators", REASON_MISSING)


@contextmanager
def chosen(*, wanted: bool) -> Generator[None]:
    """`choose` for tests and comparisons: afterwards as before."""
    before = _Switch.wanted
    choose(wanted=wanted)
    try:
        yield
    finally:
        choose(wanted=before)


def takes(*tensors: Tensor) -> bool:
    """Whether they calculate with these, which are all that a gradient could be wanted of: float32 on a CPU."""
    if not _Switch.on:
        return False
    differentiable = torch.is_grad_enabled()
    for x in tensors:  # all() would cost as much as an operator of one row
        if x.dtype is not torch.float32 or not x.is_cpu or (differentiable and x.requires_grad):
            return False
    return True
