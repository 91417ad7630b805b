"""Conversations with images that a canary asks: the same for a seed, and pairs that differ in their pictures alone."""

from __future__ import annotations

from typing import Any

import deepseek_recipe as recipe
import pytest

from whalepod.cluster.canary_images import ImageCase, as_told, plan_image_cases
from whalepod.cluster.canary_report import Answer, CanaryReport, note_difference
from whalepod.model.conformity_vision import RELEASED
from whalepod.model.vision.preparation import ImagePreparer


def parts(case: ImageCase) -> list[dict[str, Any]]:
    return list(case.messages[0]["content"])


def urls(case: ImageCase) -> list[str]:
    return [part["image_url"]["url"] for part in parts(case) if part["type"] == "image_url"]


def test_the_same_seed_asks_the_same_and_another_something_else() -> None:
    assert plan_image_cases(count=3, seed=3) == plan_image_cases(count=3, seed=3)
    assert len(plan_image_cases(count=3)) == 3
    assert plan_image_cases(count=2, seed=3) != plan_image_cases(count=2, seed=4)


def test_a_pair_differs_in_its_pictures_alone() -> None:
    cases = plan_image_cases(count=6)
    for one, other in zip(cases[::2], cases[1::2], strict=True):
        assert (one.salt, one.sampling) == (other.salt, other.sampling)
        words = [[part["text"] for part in parts(case) if part["type"] == "text"] for case in (one, other)]
        assert words[0] == words[1]
        assert urls(one)[0] != urls(other)[0]
    assert {case.sampling.temperature for case in cases} == {0.0, 1.0}
    assert {len(urls(case)) for case in cases} == {1, 2}


def test_every_picture_is_one_that_the_model_takes() -> None:
    sources = [recipe.DataUrlImageSource(url) for case in plan_image_cases(count=4) for url in urls(case)]
    assert len(ImagePreparer(RELEASED).begin(sources, field="messages").all()) == len(sources)


@pytest.mark.parametrize(
    ("told", "same"),
    [
        ((b"aaaa", b"bbbb", b"cccc"), True),
        ((b"bbbb", b"cccc"), True),
        ((b"cccc", b"bbbb"), False),
        ((b"aaaa", b"dddd"), False),
        ((b"aaaa", b"aaaa"), False),
        ((), False),
    ],
)
def test_scores_that_are_told_must_be_those_that_were_drawn_in_their_order(told: tuple[bytes, ...], same: bool) -> None:
    truth, answer, report = Answer((5, 6, 7), (b"aaaa", b"bbbb", b"cccc")), Answer((5, 6, 7), told), CanaryReport()
    note_difference("request 7", answer, as_told(truth, answer), report)
    assert (report.different, report.logprob_different) == (0, int(not same))


@pytest.mark.parametrize(
    ("answer", "different", "scores"),
    [(Answer((1, 2), (b"abcd",)), 0, 0), (Answer((1, 3), (b"abcd",)), 1, 0), (Answer((1, 2), (b"abce",)), 0, 1)],
)
def test_a_difference_is_counted_and_the_first_is_told(answer: Answer, different: int, scores: int) -> None:
    report = CanaryReport()
    for _ in range(2):
        note_difference("request 7", answer, Answer((1, 2), (b"abcd",)), report)
    assert (report.different, report.logprob_different) == (2 * different, 2 * scores)
    assert (report.first_difference is not None) == bool(different + scores)
