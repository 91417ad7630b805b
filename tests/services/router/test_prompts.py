"""The four forms of `prompt`, and everything that only looks like one."""

from __future__ import annotations

from typing import Any

import pytest

from whalepod.core.errors import InvalidFieldError
from whalepod.services.router.prompts import IdsPrompt, TextPrompt, parse_prompts

VOCAB = 500


@pytest.mark.parametrize(
    ("value", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 499]], 2), (["x"] * 128, 128), ([0], 1)],
)
def test_the_four_forms_are_read(value: Any, count: int) -> None:
    prompts = parse_prompts(value, vocab_size=VOCAB)
    assert len(prompts) == count
    for prompt, original in zip(prompts, value if count > 1 else [value], strict=True):
        match prompt:
            case TextPrompt(text):
                assert [text] == [original] or [text] == original
            case IdsPrompt(ids):
                assert list(ids) == list(original)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        [[1], []],
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        [[1, "a"]],
        [[1.0]],
        [1.5],
        [True, False],
        [[True]],
        [None],
        [-1],
        [VOCAB],
        [[VOCAB]],
        [2**31],
        [2**32],
        [2**70],
        {"text": "a"},
        7,
        True,
        ["x"] * 129,
        [[[1]]],
    ],
)
def test_anything_else_is_refused_naming_the_field(value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        parse_prompts(value, vocab_size=VOCAB)
    assert caught.value.field == "prompt"
