"""Answers are judged as a client would see them: parsed by the released layer, checked against schemas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.evaluation.held_out_file import (
    CONFIG,
    ENCODER,
    TOKENIZER,
    json_line,
    recall_line,
    tool_line,
    write_held_out,
)
from whalepod.engine.evaluation.answers import AnswerWay, Share, answer_questions, judged, recall_by_distance
from whalepod.engine.evaluation.held_out import HeldOut, Question
from whalepod.engine.evaluation.measured_engine import Answered
from whalepod.engine.interface import FinishReason
from whalepod.engine.rank_model import RankModel
from whalepod.model.tiny_checkpoint import SMALLEST, write_tiny_checkpoint

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n<｜DSML｜ parameter name="age" string="false">{age}'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def questions(directory: Path) -> dict[str, Question]:
    lines = [
        json_line(),
        tool_line(),
        recall_line("Tim has a cat.", "What has Tim?", "Tim has a cat.", words_behind=60),
    ]
    held_out = HeldOut.read(write_held_out(directory, lines), TOKENIZER, CONFIG)
    return {question.kind: question for question in held_out.questions}


@pytest.mark.parametrize(
    ("kind", "said", "valid", "right"),
    [
        ("json", '{"age": 7}', True, True),
        ("json", '{"age": 8}', True, False),
        ("json", '{"age": "7"}', False, False),
        ("json", '{"age": 7', False, False),
        ("json", "seven", False, False),
        ("tool", CALL.format(name="get_age", age="7"), True, True),
        ("tool", CALL.format(name="get_age", age="8"), True, False),
        ("tool", CALL.format(name="get_age", age='"7"'), False, False),
        ("tool", CALL.format(name="get_name", age="7"), False, False),
        ("tool", "Tim is 7.", False, False),
        ("recall", "Tim has a cat.", True, True),
        ("recall", "Tim has a dog.", True, False),
        ("recall", "", False, False),
    ],
)
def test_valid_is_the_form_and_right_is_what_was_to_be_said(
    tmp_path: Path, kind: str, said: str, valid: bool, right: bool
) -> None:
    question = questions(tmp_path)[kind]
    prompt = ENCODER.chat(question.body, context_tokens=8192)
    ids = TOKENIZER.file.encode(said, add_special_tokens=False).ids
    given = judged(question, prompt, ids, Answered())
    assert (given.valid, given.right) == (valid, right), given.message
    cut = judged(question, prompt, ids, Answered(reason=FinishReason.LENGTH))
    assert (cut.valid, cut.right) == (False, False), "an answer that was cut off is none"


@pytest.mark.slow
def test_answers_in_every_way_to_serve(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", block_tokens=16, **SMALLEST)
    model, asked = RankModel.load(tmp_path / "model"), questions(tmp_path)
    guided = answer_questions(model, [asked["json"]], AnswerWay(guided=True, answer_tokens=40))
    assert guided[0].message["content"].lstrip().startswith("{"), "random weights say JSON only if they must"
    every = list(asked.values())
    plain = answer_questions(model, every, AnswerWay(answer_tokens=4))
    hit = answer_questions(model, every, AnswerWay(reuse=True, answer_tokens=4))
    assert [one.cached_tokens for one in plain] == [0, 0, 0]
    lengths = [len(ENCODER.chat(question.body, context_tokens=8192).prompt_ids) for question in every]
    boundaries = [model.boundaries.hit(stored_tokens=length, prompt_tokens=length) for length in lengths]
    assert [one.cached_tokens for one in hit] == boundaries
    assert Share.of(hit).found == sum(boundary > 0 for boundary in boundaries) >= 2
    (share,) = recall_by_distance(plain).values()
    assert (share.asked, share.right) == (1, 0)
