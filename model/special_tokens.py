"""Spellings of the special tokens. They are the released model's where the prompt format names them, so that the
released prompt layer (`deepseek_recipe`) works with our tokenizer as it does with the released one."""

from __future__ import annotations

from deepseek_recipe import SpecialToken, SpecialTokens

IMAGE_SPELLING = "<｜deepseek_image｜>"
"""The released tokenizer spells the image token so; the prompt layer's default differs."""

PAD_SPELLING = "<｜▁pad▁｜>"
NOISE_SPELLING = "<｜dspark▁noise｜>"
"""Fills the rows that a draft round predicts. Ours: any id that no text contains would do."""


def recipe_special_tokens() -> SpecialTokens:
    """The spellings to pass to the prompt layer's encoding, conversion and parsing."""
    return SpecialTokens(image=IMAGE_SPELLING)


def all_spellings() -> list[str]:
    """Every special token of our tokenizer, in the order of their ids: 0 begin, 1 end, 2 padding, …"""
    spellings = recipe_special_tokens()
    first = [spellings.token(SpecialToken.Bos), spellings.token(SpecialToken.Eos), PAD_SPELLING]
    prompt = [
        SpecialToken.System,
        SpecialToken.User,
        SpecialToken.Assistant,
        SpecialToken.LatestReminder,
        SpecialToken.ThinkingStart,
        SpecialToken.ThinkingEnd,
        SpecialToken.Dsml,
        SpecialToken.Image,
        SpecialToken.Ref,
        SpecialToken.RefEnd,
        SpecialToken.Box,
        SpecialToken.BoxEnd,
        SpecialToken.Point,
        SpecialToken.PointEnd,
        SpecialToken.Polygon,
        SpecialToken.PolygonEnd,
    ]
    return [*first, *(spellings.token(token) for token in prompt), NOISE_SPELLING]
