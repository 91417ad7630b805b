"""A router over one decode and one prefill rank, and what a router reads of a checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.router.fake_ranks import FakeDecode, FakePrefill
from tests.services.router.router_under_test import RouterUnderTest, running_router, write_model_files


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("model"))


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
