"""Protobuf on the wire, dataclasses inside: the one place that translates between them.

Beside it: `tickets.py` (signatures), `error_codes.py` (errors and gRPC status), `step_message.py` (decode's steps),
`grpc_options.py` (limits and keepalive).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from whalepod.core.errors import InternalError, InvalidFieldError
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.images import RequestImage
from whalepod.engine.interface import Fidelity, FinishReason, Handoff, RankLoad, SampledToken, SnapshotKind
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.vision.preparation import content_hash
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.prefill.v1 import prefill_pb2

FINISH_REASONS: Mapping[FinishReason, common_pb2.FinishReason] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_REASONS_BACK = {code: reason for reason, code in FINISH_REASONS.items()}

SNAPSHOT_KINDS: Mapping[SnapshotKind, prefill_pb2.SnapshotKind] = {
    SnapshotKind.FULL: prefill_pb2.SNAPSHOT_KIND_FULL,
    SnapshotKind.ENCODER: prefill_pb2.SNAPSHOT_KIND_ENCODER,
}
_SNAPSHOT_KINDS_BACK = {code: kind for kind, code in SNAPSHOT_KINDS.items()}

FIDELITIES: Mapping[Fidelity, common_pb2.Fidelity] = {
    Fidelity.FAST: common_pb2.FIDELITY_FAST,
    Fidelity.EXACT: common_pb2.FIDELITY_EXACT,
}
_FIDELITIES_BACK = {code: fidelity for fidelity, code in FIDELITIES.items()}

ALTERNATIVES_MAX = 255
"""Of one token: step messages count them in a byte."""


def finish_reason_from_proto(code: common_pb2.FinishReason) -> FinishReason | None:
    """None for the unspecified reason: the request goes on."""
    return _FINISH_REASONS_BACK.get(code)


def fidelity_from_proto(code: common_pb2.Fidelity) -> Fidelity:
    """Unspecified is `fast`, the default. Raises InvalidFieldError on a value of tomorrow."""
    if code == common_pb2.FIDELITY_UNSPECIFIED:
        return Fidelity.FAST
    if code not in _FIDELITIES_BACK:
        raise InvalidFieldError("fidelity", f"unknown fidelity {int(code)}")
    return _FIDELITIES_BACK[code]


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        bad_word_ids=[struct.pack(f"<{len(word)}I", *word) for word in sampling.bad_word_ids],
        grammar=_grammar_to_proto(sampling),
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Absent fields take their defaults. Raises InvalidFieldError, as SamplingParams does, on a bad value."""
    names = (
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "logprobs", "prompt_logprobs",
        "repetition_penalty",
    )  # fmt: skip
    present = {name: getattr(message, name) for name in names if message.HasField(name)}
    return SamplingParams(
        **present,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids) or None,
        bad_words=tuple(message.bad_words),
        bad_word_ids=tuple(map(_word_from_proto, message.bad_word_ids)),
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        grammar_starts_after=message.grammar.starts_after if message.grammar.HasField("starts_after") else None,
    )


def _word_from_proto(packed: bytes) -> tuple[int, ...]:
    """Raises InvalidFieldError."""
    if len(packed) % 4:
        raise InvalidFieldError("bad_word_ids", "bad_word_ids: each must be packed 4-byte token ids")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _grammar_to_proto(sampling: SamplingParams) -> common_pb2.Grammar | None:
    if sampling.grammar is None:
        return None
    return common_pb2.Grammar(
        kind=sampling.grammar.kind.value,
        source=sampling.grammar.source,
        starts_after=sampling.grammar_starts_after,
    )


def _grammar_from_proto(message: common_pb2.Grammar) -> GrammarSpec:
    """Raises InvalidFieldError."""
    try:
        return GrammarSpec.create(GrammarKind(message.kind), message.source)
    except ValueError:
        raise InvalidFieldError("grammar", f"grammar: unknown kind {message.kind!r}") from None
    except GrammarError as error:
        raise InvalidFieldError("grammar", f"grammar: {error}") from error


def image_to_proto(image: RequestImage) -> common_pb2.Image:
    return common_pb2.Image(
        start=image.start, tokens=image.tokens, width=image.width, height=image.height, data=image.data
    )


def image_from_proto(message: common_pb2.Image, *, salt: bytes, owner: int) -> RequestImage:
    """The hash is taken anew: it names what was received. `salt` and `owner` are those of the request."""
    return RequestImage(
        start=message.start,
        tokens=message.tokens,
        content_hash=content_hash(message.data, message.width, message.height),
        data=message.data,
        width=message.width,
        height=message.height,
        salt=salt,
        owner=owner,
    )


def token_to_proto(token: SampledToken) -> common_pb2.Token:
    return common_pb2.Token(
        id=token.id,
        logprob=token.logprob,
        top_ids=struct.pack(f"<{len(token.top_ids)}I", *token.top_ids),
        top_logprobs=struct.pack(f"<{len(token.top_logprobs)}f", *token.top_logprobs),
    )


def token_from_proto(message: common_pb2.Token) -> SampledToken:
    """Raises InternalError if its alternatives are not whole, or too many for a step message."""
    count = len(message.top_ids) // 4
    whole = len(message.top_ids) == len(message.top_logprobs) == 4 * count
    if not whole or count > ALTERNATIVES_MAX:
        raise InternalError("the alternatives of a token cannot be read")
    return SampledToken(
        id=message.id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_ids=struct.unpack(f"<{count}I", message.top_ids),
        top_logprobs=struct.unpack(f"<{count}f", message.top_logprobs),
    )


def load_to_proto(load: RankLoad) -> common_pb2.Load:
    return common_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        blocks_free=load.blocks_free,
        blocks_total=load.blocks_total,
        prefill_tokens_queued=load.prefill_tokens_queued,
        slots_total=load.slots_total,
    )


def load_from_proto(message: common_pb2.Load) -> RankLoad:
    return RankLoad(
        running=message.running,
        waiting=message.waiting,
        blocks_free=message.blocks_free,
        blocks_total=message.blocks_total,
        prefill_tokens_queued=message.prefill_tokens_queued,
        slots_total=message.slots_total,
    )


def handoff_to_proto(handoff: Handoff, load: RankLoad) -> prefill_pb2.RunResponse:
    return prefill_pb2.RunResponse(
        snapshot_kind=SNAPSHOT_KINDS[handoff.kind] if handoff.kind else prefill_pb2.SNAPSHOT_KIND_UNSPECIFIED,
        boundary_tokens=handoff.boundary_tokens,
        first_token=token_to_proto(handoff.first_token) if handoff.first_token else None,
        finish_reason=FINISH_REASONS[handoff.finish_reason]
        if handoff.finish_reason
        else common_pb2.FINISH_REASON_UNSPECIFIED,
        cached_tokens=handoff.cached_tokens,
        replayed_tokens=handoff.replayed_tokens,
        blocks_stored=handoff.blocks_stored,
        exact=handoff.exact,
        load=load_to_proto(load),
        stored=handoff.stored,
        matched_stop_id=handoff.matched_stop_id,
        direct_address=handoff.direct_address,
    )


def handoff_from_proto(message: prefill_pb2.RunResponse) -> Handoff:
    """Raises InternalError, as `token_from_proto` does."""
    return Handoff(
        boundary_tokens=message.boundary_tokens,
        kind=_SNAPSHOT_KINDS_BACK.get(message.snapshot_kind),
        first_token=token_from_proto(message.first_token) if message.HasField("first_token") else None,
        finish_reason=finish_reason_from_proto(message.finish_reason),
        matched_stop_id=message.matched_stop_id if message.HasField("matched_stop_id") else None,
        cached_tokens=message.cached_tokens,
        replayed_tokens=message.replayed_tokens,
        blocks_stored=message.blocks_stored,
        exact=message.exact,
        stored=message.stored,
        direct_address=message.direct_address,
    )
