"""The child process in which every grammar is tried before a rank or a router believes that it can be compiled.

llguidance bounds most of its work, but not all: some grammars keep it busy for hours, some overflow its stack, which
ends a process. So a child compiles them first, on a small stack, with little memory and time, and follows them for a
few tokens. What it survives, its parent will. One line of JSON a message, in the order of the requests:

    ◀ {"tokenizer": text, "vocab_size": …, "eos_id": …, "cpu_s_max": …}     ▶ {}
    ◀ {"kind": …, "source": …}                                              ▶ {"lowered": …} or {"error": …}
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from whalepod.model.tokenizer import Tokenizer

from .errors import DeadEndError, GrammarError
from .lowering import lower
from .masks import allocate, unpack
from .matcher import CompiledGrammar
from .spec import GrammarKind, GrammarSpec
from .vocabulary import Vocabulary

STACK_BYTES = 1 << 20
"""An eighth of what threads have on Linux, where the parent follows the grammar."""
MEMORY_BYTES_MAX = 4 << 30
"""Of address space, most of which is never touched."""
NICENESS = 5
WALK_TOKENS = 32
_WALK_STRIDE = 7919
"""A prime: the walk looks here and there among the allowed tokens, the same way every time."""


def main() -> None:
    os.nice(NICENESS)
    soft_max = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES_MAX if soft_max == resource.RLIM_INFINITY else min(MEMORY_BYTES_MAX, soft_max)
    resource.setrlimit(resource.RLIMIT_AS, (limit, soft_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, name="trial")
    thread.start()
    thread.join()


def _serve() -> None:
    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return
    tokenizer = Tokenizer(setup["tokenizer"])
    vocabulary = Vocabulary.create(tokenizer, size=setup["vocab_size"], eos_id=setup["eos_id"])
    _answer({})
    for line in sys.stdin:
        # The time that this process may spend, not the time that passes: a busy machine spoils no grammar. Nothing
        # handles the signal, so it ends the process wherever it is.
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_s_max"])
        answer = _try(json.loads(line), vocabulary)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answer)


def _try(request: Mapping[str, str], vocabulary: Vocabulary) -> dict[str, Any]:
    try:
        spec = GrammarSpec(GrammarKind(request["kind"]), request["source"])
        lowered = lower(spec, marker_id=vocabulary.call_marker_id)
        walk(CompiledGrammar(spec, lowered, vocabulary))
    except GrammarError as error:
        return {"error": str(error)}
    except (MemoryError, RecursionError):
        return {"error": "the grammar is too large"}
    return {"lowered": lowered}


def walk(grammar: CompiledGrammar) -> None:
    """Follow it for a few tokens. Raises GrammarError if there is no first one, or a limit is exceeded on the way."""
    matcher, size = grammar.matcher(), grammar.vocabulary.size
    mask = allocate(1, size)[0]
    for step in range(WALK_TOKENS):
        try:
            matcher.fill(mask)
        except DeadEndError:
            if step:
                return
            raise
        allowed = np.flatnonzero(unpack(mask, size))
        matcher.accept(int(allowed[step * _WALK_STRIDE % len(allowed)]))
        if matcher.ended:
            return


def _answer(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
