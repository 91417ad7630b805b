"""Text to tokens and back, for one event loop: what is long is done by worker threads, which release the lock."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from deepseek_recipe import SpecialToken

from whalepod.core.clock import Deadline
from whalepod.core.errors import DeadlineError, InvalidFieldError
from whalepod.engine.bad_words import encode_bad_words
from whalepod.engine.grammar.compiler import grammar_checker
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.config import ModelConfig
from whalepod.model.detokenizer import Detokenizer
from whalepod.model.prompt import ChatPrompt, Conversed, PromptEncoder
from whalepod.model.protocols import CHAT, Protocol
from whalepod.model.special_tokens import recipe_special_tokens
from whalepod.model.tokenizer import Tokenizer
from whalepod.model.vision.preparation import PreparedImage

from .answer_format import AnswerFormat
from .image_fetch import ImageFetcher
from .prompts import Prompt, TextPrompt
from .router_metrics import IMAGE_PREPARE_SECONDS, IMAGES, TOKENIZE_SECONDS

INLINE_CHARS_MAX = 4096
"""Shorter texts are encoded on the event loop: that takes less than handing them to a thread."""

WORKERS = 2
IMAGE_WORKERS = 2
"""Resizing an image takes 30 to 500 ms: texts do not wait behind it."""

IMAGES_SECONDS_MAX = 60.0
"""For all images of a request that has no deadline of its own."""

T = TypeVar("T")


class Language:
    """The tokenizer and prompt encoder of the served model."""

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, *, served_name: str, image_hosts: Collection[str] = ()
    ) -> None:
        """`image_hosts`: images are fetched from there though it is not on the internet.

        Raises CheckpointError if the tokenizer cannot encode the chat format.
        """
        self.tokenizer = tokenizer
        self.vocab_size = config.vocab_size
        self.bos_token_id = config.bos_token_id
        self.eos_token_id = config.eos_token_id
        self._encoder = PromptEncoder(tokenizer, config, served_names=[served_name])
        self.think_end_id = tokenizer.token_id(recipe_special_tokens().token(SpecialToken.ThinkingEnd))
        """Ends the model's reasoning."""
        self._grammars = grammar_checker(tokenizer, vocab_size=config.vocab_size, eos_id=config.eos_token_id)
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenize")
        self._image_workers = ThreadPoolExecutor(IMAGE_WORKERS, thread_name_prefix="images")
        self._fetcher = ImageFetcher(trusted_hosts=image_hosts)

    async def prompt_ids(self, prompt: Prompt, *, context_tokens: int) -> Sequence[int]:
        """Ids of a completion's prompt; a text gets a begin-of-sequence token. Raises what `PromptEncoder.completion`
        does; ids that are given are not counted here."""
        if not isinstance(prompt, TextPrompt):
            return prompt.ids
        text = prompt.text
        return await self._run(
            lambda: array("I", self._encoder.completion(text, context_tokens=context_tokens)), chars=len(text)
        )

    async def chat_prompt(
        self,
        body: Mapping[str, Any],
        *,
        context_tokens: int,
        chars: int,
        protocol: Protocol = CHAT,
        deadline: Deadline | None = None,
    ) -> ChatPrompt:
        """Renders and encodes a conversation of about `chars` characters, and makes its images ready. Raises what
        `PromptEncoder.chat` does, and DeadlineError where it has images."""
        begun = await self._run(
            lambda: self._encoder.begin(body, context_tokens=context_tokens, protocol=protocol), chars=chars
        )
        if isinstance(begun, ChatPrompt):
            return begun
        with IMAGE_PREPARE_SECONDS.time():
            images = await self._images(begun, context_tokens, deadline or Deadline.after(IMAGES_SECONDS_MAX))
        return await self.run(lambda: self._encoder.finish(begun, images, context_tokens=context_tokens))

    async def _images(self, begun: Conversed, context_tokens: int, deadline: Deadline) -> Sequence[PreparedImage]:
        """One by one, in turn with those of other requests."""
        IMAGES.inc(len(begun.sources))
        field = begun.protocol.conversation_field
        sources = await self._fetcher.fetched(begun.sources, field=field, deadline=deadline)
        work = self._encoder.begin_images(begun, sources, context_tokens=context_tokens)
        loop = asyncio.get_running_loop()
        while not work.done:
            if deadline.expired:
                raise DeadlineError("the request's deadline passed while its images were being made ready")
            await loop.run_in_executor(self._image_workers, work.step)
        return work.images

    async def text_of(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text that ids stand for. Bytes that are no UTF-8 become U+FFFD."""

        def decode() -> str:
            detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
            return detokenizer.push(ids) + detokenizer.finish()

        return await self._run(decode, chars=len(ids))

    async def with_bad_word_ids(self, sampling: SamplingParams) -> SamplingParams:
        """With its bad words as ids, which is what ranks know. Raises InvalidFieldError."""
        return await self.run(lambda: encode_bad_words(sampling, self.tokenizer.encode))

    async def check_format(self, answer: AnswerFormat, *, deadline: Deadline) -> None:
        """Returns if ranks will be able to follow it.

        Raises InvalidFieldError naming its field, CapacityError if too many others are being checked, DeadlineError.
        """
        # Others may wait for the same grammar: who goes away must not take it with him.
        checked = asyncio.shield(asyncio.wrap_future(self._grammars.compile(answer.spec)))
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await checked
        except TimeoutError:
            raise DeadlineError("the request's deadline passed while its grammar was being compiled") from None
        except GrammarError as error:
            raise InvalidFieldError(answer.field, f"{answer.field}: {error}") from error

    async def run(self, work: Callable[[], T]) -> T:
        """Other CPU work that is too long for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def token_text(self, token_id: int) -> str:
        """One token by itself, as log-probabilities name it."""
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._image_workers.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def _run(self, work: Callable[[], T], *, chars: int) -> T:
        with TOKENIZE_SECONDS.time():
            return work() if chars <= INLINE_CHARS_MAX else await self.run(work)
