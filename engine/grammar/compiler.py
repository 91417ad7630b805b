"""Compiles grammars beside the engine: a few threads, each with a child that tries every grammar first, and a cache.

spec ──▶ cache ──▶ worker thread ──▶ trial in a child ──▶ compiled here ──▶ future
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Generic, TypeVar

from whalepod.core.errors import CapacityError
from whalepod.model.tokenizer import Tokenizer

from .errors import GrammarError
from .matcher import CompiledGrammar
from .spec import GrammarSpec
from .trial_process import TrialProcess, TrialSetup
from .vocabulary import Vocabulary

WORKERS = 2
PENDING_MAX = 64
"""Grammars that are being compiled or wait for it."""
CPU_S_MAX = 5.0
"""Of a core, for one grammar. Real schemas take 1–50 ms, the largest that is accepted two seconds."""
CACHE_BYTES_MAX = 256 << 20

# llguidance does not say what a grammar holds. Measured on large ones: 110–180 bytes for each byte of source.
_BYTES_EACH = 64 << 10
_BYTES_PER_SOURCE_BYTE = 200

T = TypeVar("T")


class GrammarCompiler(Generic[T]):
    """Thread-safe. Equal specs are compiled once; what was found to be wrong with one is remembered too."""

    def __init__(
        self,
        setup: TrialSetup,
        finish: Callable[[GrammarSpec, str], T],
        *,
        workers: int = WORKERS,
        pending_max: int = PENDING_MAX,
        cache_bytes_max: int = CACHE_BYTES_MAX,
    ) -> None:
        """`finish` makes the result of a spec and the same in llguidance's words; it may raise GrammarError."""
        self._finish = finish
        self._pending_max = pending_max
        self._cache_bytes_max = cache_bytes_max
        self._trials = [TrialProcess(setup) for _ in range(workers)]
        self._idle: queue.LifoQueue[TrialProcess] = queue.LifoQueue()  # the last one used has started
        for trial in self._trials:
            self._idle.put(trial)
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Future[T]] = OrderedDict()
        self._cached_bytes = 0
        self._pending = 0

    def compile(self, spec: GrammarSpec) -> Future[T]:
        """Its result, or GrammarError, or InternalError. Never waits. Raises CapacityError if too many are pending."""
        with self._lock:
            known = self._cache.get(spec)
            if known is not None:
                self._cache.move_to_end(spec)
                return known
            if self._pending >= self._pending_max:
                raise CapacityError(f"{self._pending_max} grammars are waiting to be compiled")
            future = self._workers.submit(self._compile, spec)
            self._cache[spec] = future
            self._cached_bytes += _bytes_of(spec)
            self._pending += 1
        future.add_done_callback(lambda done: self._compiled(spec, done))
        return future

    def close(self) -> None:
        """End the children and the threads. What is pending fails."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _compile(self, spec: GrammarSpec) -> T:
        trial = self._idle.get()
        try:
            lowered = trial.lower(spec)
        finally:
            self._idle.put(trial)
        return self._finish(spec, lowered)

    def _compiled(self, spec: GrammarSpec, future: Future[T]) -> None:
        """What failed for another reason than the grammar may succeed the next time."""
        with self._lock:
            self._pending -= 1
            if future.cancelled() or not isinstance(future.exception(), GrammarError | None):
                self._forget(spec)
            for oldest in list(self._cache):
                if self._cached_bytes <= self._cache_bytes_max:
                    break
                if self._cache[oldest].done():
                    self._forget(oldest)

    def _forget(self, spec: GrammarSpec) -> None:
        if self._cache.pop(spec, None) is not None:
            self._cached_bytes -= _bytes_of(spec)


def rank_compiler(
    tokenizer: Tokenizer, *, vocab_size: int, eos_id: int, cpu_s_max: float = CPU_S_MAX
) -> GrammarCompiler[CompiledGrammar]:
    """For a rank, which follows what it compiles. The first grammar makes the vocabulary."""

    @cache
    def vocabulary() -> Vocabulary:
        return Vocabulary.create(tokenizer, size=vocab_size, eos_id=eos_id)

    setup = TrialSetup(tokenizer.json, vocab_size, eos_id, cpu_s_max)
    return GrammarCompiler(setup, lambda spec, lowered: CompiledGrammar(spec, lowered, vocabulary()))


def grammar_checker(
    tokenizer: Tokenizer, *, vocab_size: int, eos_id: int, cpu_s_max: float = CPU_S_MAX
) -> GrammarCompiler[None]:
    """For a router, which only wants to know whether ranks will be able to follow a grammar."""
    setup = TrialSetup(tokenizer.json, vocab_size, eos_id, cpu_s_max)
    return GrammarCompiler(setup, lambda _spec, _lowered: None)


def _bytes_of(spec: GrammarSpec) -> int:
    return _BYTES_EACH + _BYTES_PER_SOURCE_BYTE * len(spec.source.encode())
