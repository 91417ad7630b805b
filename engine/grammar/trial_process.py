"""The parent's end of a trial: starts the child, asks it, and starts another after one has died of a grammar."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from whalepod.core.clock import Deadline
from whalepod.core.errors import InternalError

from .errors import GrammarError
from .spec import GrammarSpec

PATIENCE_S = 60.0
"""For an answer, on a machine that is busy with something else. The child's own limit is in seconds of a core."""
_COMMAND = (sys.executable, "-m", "whalepod.engine.grammar.trial")


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """What a child must know to try grammars as its parent will follow them."""

    tokenizer_json: str
    vocab_size: int
    eos_id: int
    cpu_s_max: float


class TrialProcess:
    """One child, started when it is first needed. One thread at a time asks; `close` may come from another."""

    def __init__(self, setup: TrialSetup) -> None:
        self._setup = setup
        self._asking = threading.Lock()
        self._closed = False
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def lower(self, spec: GrammarSpec) -> str:
        """The spec in llguidance's words, which will compile. Blocks for as long as the child may take.

        Raises GrammarError on a spec that does not compile or has cost the child its life, InternalError if no child
        can be started.
        """
        with self._asking:
            self._start_or_raise()
            answer = self._ask({"kind": spec.kind.value, "source": spec.source})
            if answer is None:
                reason = self._bury()
                raise InternalError("the rank is stopping") if self._closed else GrammarError(reason)
        if "error" in answer:
            raise GrammarError(answer["error"])
        return answer["lowered"]

    def close(self) -> None:
        """End the child, whatever it does; who asks for another is refused. Idempotent."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._asking:
            if self._child is not None:
                self._bury()

    def _start_or_raise(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        if self._child is not None:
            self._bury()
        try:
            self._child = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise InternalError(f"no process can be started to try a grammar: {error.strerror}") from error
        if self._closed:  # looked at after the child is there for `close` to see
            self._child.kill()
        self._unread = b""
        setup = self._setup
        ready = self._ask(
            {
                "tokenizer": setup.tokenizer_json,
                "vocab_size": setup.vocab_size,
                "eos_id": setup.eos_id,
                "cpu_s_max": setup.cpu_s_max,
            }
        )
        if ready is None:
            self._bury()
            raise InternalError("the process that tries grammars does not start")

    def _ask(self, message: Mapping[str, str | float]) -> dict[str, str] | None:
        """The answer; None if the child died or said nothing in time."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._read_line(Deadline.after(PATIENCE_S))
        return None if line is None else json.loads(line)

    def _read_line(self, deadline: Deadline) -> bytes | None:
        assert self._child is not None
        assert self._child.stdout is not None
        output = self._child.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(1000 * deadline.remaining_s()):
                return None
            received = os.read(output, 1 << 16)
            if not received:
                return None
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _bury(self) -> str:
        """Wait for a child that is dying, or kill it; what to say of the grammar that it died of."""
        child, self._child = self._child, None
        assert child is not None
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                _close_quietly(pipe)
        try:
            code = child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            code = -signal.SIGPROF
        if code == -signal.SIGPROF:
            return f"compiling the grammar takes longer than {self._setup.cpu_s_max:g} s"
        return "the grammar is too large or too deeply nested to be compiled"


def _close_quietly(pipe: IO[bytes]) -> None:
    """Closing flushes, and whoever should read it may be gone."""
    try:
        pipe.close()
    except BrokenPipeError:
        pass
