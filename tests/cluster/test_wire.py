"""Protobuf and dataclasses say the same."""

from __future__ import annotations

import pytest

from whalepod.cluster.wire import (
    FIDELITIES,
    fidelity_from_proto,
    handoff_from_proto,
    handoff_to_proto,
    load_from_proto,
    load_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    token_from_proto,
    token_to_proto,
)
from whalepod.core.errors import InternalError, InvalidFieldError
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.interface import Fidelity, FinishReason, Handoff, RankLoad, SampledToken, SnapshotKind
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.common.v1 import common_pb2

LOAD = RankLoad(1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, seed=-(2**63), logprobs=0, max_tokens=1),
        SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            max_tokens=2**31,
            min_tokens=3,
            ignore_eos=True,
            stop_token_ids=(1, 2**32 - 1),
            seed=0,
            logprobs=20,
            prompt_logprobs=0,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.25,
            logit_bias={5: -100.0, 7: 0.5},
            allowed_token_ids=(0, 2**32 - 1),
            bad_words=("é", " b"),
            bad_word_ids=((2**32 - 1,), (1, 0, 2)),
        ),
        SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, "é+"), grammar_starts_after=0),
        SamplingParams(grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"null"}')),
        SamplingParams(grammar=GrammarSpec(GrammarKind.JSON_OBJECT)),
    ],
)
def test_sampling_round_trips(sampling: SamplingParams) -> None:
    assert sampling_from_proto(sampling_to_proto(sampling)) == sampling


def test_absent_sampling_fields_take_their_defaults() -> None:
    assert sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (common_pb2.Grammar(kind="xml", source="a"), "unknown kind 'xml'"),
        (common_pb2.Grammar(), "unknown kind ''"),
        (common_pb2.Grammar(kind="json_schema", source="{"), "the JSON schema cannot be read"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(grammar: common_pb2.Grammar, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        sampling_from_proto(common_pb2.SamplingParams(grammar=grammar))
    assert caught.value.field == "grammar"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.SamplingParams(top_p=0.0), "top_p"),
        (common_pb2.SamplingParams(bad_words=[""]), "bad_words"),
        (common_pb2.SamplingParams(bad_word_ids=[b"abc"]), "bad_word_ids"),
        (common_pb2.SamplingParams(bad_word_ids=[b""]), "bad_word_ids"),
    ],
)
def test_a_bad_sampling_value_names_its_field(message: common_pb2.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        sampling_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize("token", [SampledToken(7), SampledToken(7, -0.5), SampledToken(7, 0.0, (7, 8), (0.0, -1.5))])
def test_tokens_round_trip(token: SampledToken) -> None:
    assert token_from_proto(token_to_proto(token)) == token


@pytest.mark.parametrize(
    "handoff",
    [
        Handoff(0, None),
        Handoff(40, SnapshotKind.ENCODER, cached_tokens=16, replayed_tokens=12, blocks_stored=2, exact=False),
        Handoff(41, SnapshotKind.FULL, SampledToken(0, -1.0), FinishReason.STOP, matched_stop_id=0, stored=False),
    ],
)
def test_handoffs_round_trip(handoff: Handoff) -> None:
    assert handoff_from_proto(handoff_to_proto(handoff, LOAD)) == handoff


@pytest.mark.parametrize(
    ("ids", "logprobs"), [(b"abc", b""), (b"", bytes(4)), (bytes(8), bytes(4)), (bytes(4 * 256), bytes(4 * 256))]
)
def test_a_token_whose_alternatives_are_not_whole_is_refused(ids: bytes, logprobs: bytes) -> None:
    with pytest.raises(InternalError):
        token_from_proto(common_pb2.Token(id=7, logprob=0.0, top_ids=ids, top_logprobs=logprobs))


def test_load_round_trips() -> None:
    assert load_from_proto(load_to_proto(LOAD)) == LOAD


def test_fidelity_defaults_to_fast_and_refuses_the_unknown() -> None:
    assert [fidelity_from_proto(code) for code in FIDELITIES.values()] == list(FIDELITIES)
    assert fidelity_from_proto(common_pb2.FIDELITY_UNSPECIFIED) is Fidelity.FAST
    with pytest.raises(InvalidFieldError):
        fidelity_from_proto(99)  # pyright: ignore[reportArgumentType]  # an open enum on the wire
