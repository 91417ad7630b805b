"""What a rank refuses before it accepts: a request that it could never finish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from whalepod.core.errors import ContextLengthError, InternalError, InvalidFieldError
from whalepod.model.tensor_layout import ModelRole

from .interface import EngineRequest, Work
from .rank_model import RankModel


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Limits of one rank that a request must keep. Safe to use from any thread."""

    role: ModelRole
    vocab_size: int
    block_tokens: int
    context_tokens_max: int
    image_token_id: int | None = None
    """None: this rank has no way to the rows of images."""

    def check(self, request: EngineRequest) -> None:
        """Raises ContextLengthError, InvalidFieldError or InternalError (a request that no service should send)."""
        tokens = len(request.prompt_ids)
        if not tokens:
            raise InvalidFieldError("prompt", "the prompt must have at least one token")
        needed = tokens + len(request.resumed_ids) + 1
        if needed > self.context_tokens_max:
            raise ContextLengthError(tokens=needed, tokens_max=self.context_tokens_max)
        for ids in (request.prompt_ids, request.resumed_ids):
            if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
                raise InvalidFieldError("prompt", f"token ids must be in [0, {self.vocab_size})")
        if request.sampling.n != 1 or request.sampling.stop or request.sampling.bad_words:
            raise InternalError("a rank makes one choice, looks for no stop string, and knows bad words by their ids")
        self._check_sampling(request)
        self._check_images(request)
        if self.role is ModelRole.ENCODER and request.work is not Work.PREFILL:
            raise InternalError("this rank holds no layers above the last KV source: it cannot generate")
        if request.await_handoff and request.work is not Work.GENERATE:
            raise InternalError("only a request that generates can wait for a hand-off")
        if request.sampling.prompt_logprobs is not None and (request.work is Work.PREFILL or request.await_handoff):
            raise InternalError("log-probabilities of a prompt are computed where its answer is")
        if request.chain_root is not None and len(request.block_hashes) != tokens // self.block_tokens:
            raise InternalError(
                f"{len(request.block_hashes)} block hashes for {tokens} tokens in blocks of {self.block_tokens}"
            )

    def _check_sampling(self, request: EngineRequest) -> None:
        named: dict[str, Iterable[int]] = {
            "logit_bias": request.sampling.logit_bias,
            "allowed_token_ids": request.sampling.allowed_token_ids or (),
            "bad_word_ids": chain.from_iterable(request.sampling.bad_word_ids),
            "stop_token_ids": request.sampling.stop_token_ids,
        }
        if request.sampling.grammar_starts_after is not None:
            named["grammar_starts_after"] = (request.sampling.grammar_starts_after,)
        for field, ids in named.items():
            if any(not 0 <= token_id < self.vocab_size for token_id in ids):
                raise InvalidFieldError(field, f"{field} must name token ids in [0, {self.vocab_size})")

    def _check_images(self, request: EngineRequest) -> None:
        if request.images and self.image_token_id is None:
            raise InvalidFieldError("messages", "the model that is served here sees no images")
        before = 0
        for image in request.images:
            ids = request.prompt_ids[image.start : image.end]
            if image.start < before or len(ids) != image.tokens or set(ids) != {self.image_token_id}:
                raise InternalError(f"no span of {image.tokens} image tokens begins at {image.start} in the prompt")
            before = image.end


def request_checks(model: RankModel, context_tokens_max: int, *, sees_images: bool) -> RequestChecks:
    """Of a rank of `model`. `sees_images`: it has a way to their rows."""
    config = model.config
    return RequestChecks(
        model.role,
        config.vocab_size,
        model.block_tokens,
        context_tokens_max,
        config.image_token_id if sees_images else None,
    )
