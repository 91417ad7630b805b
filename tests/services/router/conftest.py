"""A router over one decode and one prefill rank, and what a router reads of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.router.fake_ranks import FakeDecode, FakePrefill
from tests.services.router.router_under_test import RouterUnderTest, running_router
from whalepod.model.tiny_checkpoint import SMALLEST, shipped_tokenizer, tiny_config_json


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a router reads of a checkpoint: configuration and tokenizer, no weights."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = shipped_tokenizer()
    config = tiny_config_json(tokenizer, block_tokens=16, **SMALLEST)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(tokenizer.json)
    return directory


@pytest.fixture
async def decode() -> FakeDecode:
    return FakeDecode()


@pytest.fixture
async def prefill() -> FakePrefill:
    return FakePrefill()


@pytest.fixture
async def router(model_dir: Path, decode: FakeDecode, prefill: FakePrefill) -> AsyncIterator[RouterUnderTest]:
    async with running_router(model_dir, [decode, prefill], remote_prefill_tokens_min=32) as running:
        yield running
