"""The tree of errors is the one drawn at the top of its module, and what clients read is safe and helpful."""

from __future__ import annotations

import inspect
import re

import pytest

from whalepod.core import errors
from whalepod.core.errors import (
    CapacityError,
    ContextLengthError,
    InvalidFieldError,
    ModelNotFoundError,
    RequestError,
    ServingError,
    UnavailableError,
)


def drawn_tree(drawing: str) -> dict[str, str]:
    """Child to parent, read from the indentation of the module's docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for indent, name in re.findall(r"^( *)(\w+Error)\b", drawing, flags=re.MULTILINE):
        depth = len(indent) // 4
        path[depth:] = [name]
        parents[name] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_tree_is_the_one_that_is_drawn() -> None:
    classes = {
        name: value.__base__.__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__base__
    }
    assert drawn_tree(errors.__doc__ or "") == classes


def test_no_error_is_both_the_callers_fault_and_worth_trying_elsewhere() -> None:
    both = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, RequestError) and issubclass(value, UnavailableError)
    ]
    assert both == []


def test_a_prompt_that_is_too_long_names_the_field_and_both_lengths() -> None:
    error = ContextLengthError(tokens=5000, tokens_max=4096)
    assert isinstance(error, InvalidFieldError)
    assert error.field == "prompt"
    assert "5000" in str(error)
    assert "4096" in str(error)


def test_an_unknown_model_is_answered_with_the_one_that_is_served() -> None:
    assert "whale" in str(ModelNotFoundError("gpt", served="whale"))


@pytest.mark.parametrize("retry_after_s", [None, 1.5])
def test_a_full_rank_says_when_to_come_back_if_it_knows(retry_after_s: float | None) -> None:
    error = CapacityError("every slot is taken", retry_after_s=retry_after_s)
    assert error.retry_after_s == retry_after_s
    assert isinstance(error, ServingError)
