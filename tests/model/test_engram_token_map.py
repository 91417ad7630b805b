"""Compressed token ids: as the reference numbers them, and refused where the tables were made for another map."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from whalepod.core.errors import CheckpointError
from whalepod.model.config import ModelConfig
from whalepod.model.engram_token_map import compressed_vocab_size, engram_token_map
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json
from whalepod.model.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_a"


def golden() -> tuple[Tokenizer, ModelConfig]:
    return Tokenizer.from_dir(GOLDEN / "ckpt_f32"), ModelConfig.from_dir(GOLDEN / "ckpt_f32")


def test_the_map_equals_the_reference() -> None:
    tokenizer, config = golden()
    vectors = load_file(GOLDEN / "engram.safetensors")
    token_map = engram_token_map(tokenizer, config)
    assert token_map.dtype == torch.int32
    assert torch.equal(token_map, vectors["token_map"].to(torch.int32))
    assert token_map[config.engram_pad_token_id] == vectors["pad_compressed_id"].item()


def test_text_of_the_golden_set_is_tokenized_as_there() -> None:
    tokenizer, _ = golden()
    vectors = load_file(GOLDEN / "engram.safetensors")
    texts = json.loads((GOLDEN / "engram_texts.json").read_text(encoding="utf-8"))
    assert len(texts) > 0
    for index, text in enumerate(texts):
        assert tokenizer.file.encode(text, add_special_tokens=False).ids == vectors[f"text{index}.ids"].tolist()


def test_case_accents_and_blanks_do_not_matter() -> None:
    tokenizer = shipped_tokenizer()
    token_map = engram_token_map(tokenizer, ModelConfig.from_json(tiny_config_json(tokenizer)))

    def compressed(text: str) -> int:
        (token_id,) = tokenizer.encode(text)
        return int(token_map[token_id])

    assert compressed("The") == compressed("the") == compressed(" the") == compressed(" The")
    assert compressed("the") != compressed("thing")
    assert compressed(" ") == compressed("\n")
    assert 2000 < compressed_vocab_size(tokenizer) < tokenizer.ids_end


def test_another_number_of_compressed_ids_is_refused_with_both_numbers() -> None:
    tokenizer, config = golden()
    with pytest.raises(CheckpointError, match=r"405 compressed .* 404"):
        engram_token_map(tokenizer, replace(config, engram_compressed_vocab_size=404))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    tokenizer, config = golden()
    with pytest.raises(CheckpointError, match="511"):
        engram_token_map(tokenizer, replace(config, vocab_size=504))


def test_ids_without_a_token_map_as_padding_does() -> None:
    tokenizer, config = golden()
    token_map = engram_token_map(tokenizer, replace(config, vocab_size=520))
    assert token_map.shape == (520,)
    assert set(token_map[512:].tolist()) == {int(token_map[config.engram_pad_token_id])}
