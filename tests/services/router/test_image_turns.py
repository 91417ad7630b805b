"""Images are made ready one by one: requests take turns, and nobody works for one that is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.model.vision.pictures import data_url, encoded, plain
from whalepod.core.clock import Deadline
from whalepod.core.errors import DeadlineError
from whalepod.model.config import ModelConfig
from whalepod.model.prompt import ChatPrompt
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json
from whalepod.model.vision.preparation import Preparation
from whalepod.services.router.language import IMAGE_WORKERS, Language

TOKENIZER = shipped_tokenizer()
CONFIG = ModelConfig.from_json(tiny_config_json(TOKENIZER))


class Steps:
    """Counts what is made ready, and tells when it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.begun = asyncio.Event()
        loop, step = asyncio.get_running_loop(), Preparation.step

        def counted(work: Preparation) -> None:
            self.taken += 1
            loop.call_soon_threadsafe(self.begun.set)
            step(work)

        monkeypatch.setattr(Preparation, "step", counted)


async def asked(language: Language, *widths: int, seconds: float = 60.0) -> ChatPrompt:
    urls = [data_url(encoded(plain(width, 1))) for width in widths]
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": "whale", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return await language.chat_prompt(body, context_tokens=100_000, chars=100, deadline=Deadline.after(seconds))


async def test_who_hangs_up_or_runs_out_of_time_costs_no_more_than_the_image_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    language, steps = Language(TOKENIZER, CONFIG, served_name="whale"), Steps(monkeypatch)
    gone = asyncio.create_task(asked(language, *range(1, 200)))
    await steps.begun.wait()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    taken = steps.taken
    assert len((await asked(language, 500)).images) == 1
    assert steps.taken <= taken + 2 < 10
    with pytest.raises(DeadlineError):
        await asked(language, *range(1, 200), seconds=0)
    language.close()


async def test_a_request_with_many_images_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    language, steps = Language(TOKENIZER, CONFIG, served_name="whale"), Steps(monkeypatch)
    crowd = [asyncio.create_task(asked(language, *range(1, 200))) for _ in range(IMAGE_WORKERS + 1)]
    await steps.begun.wait()
    await asked(language, 500)
    assert not any(task.done() for task in crowd)
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    language.close()
