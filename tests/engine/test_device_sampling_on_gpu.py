"""Rows of the released vocabulary drawn on a GPU. Skipped without one; to be run in a process of its own (Triton's
interpreter)."""

from __future__ import annotations

import os

import pytest
import torch

from tests.engine.sampled_rows import assert_drawn_as_on_the_host, random_groups

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU"
)


@pytest.mark.parametrize("spread", [1, 4])
def test_tokens_are_drawn_as_on_the_host(spread: float) -> None:
    assert_drawn_as_on_the_host(random_groups(7, requests=40, vocab=129_280, device="cuda", spread=spread))
