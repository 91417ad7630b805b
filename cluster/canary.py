"""Whether a cluster's tokens are the model's: the same requests through the cluster and through one process, compared.

cases ─▶ router (gRPC) ─▶ prefill ─▶ store ─▶ decode ─▶ answers ─┐
  └────▶ oracle: one rank, no store ────────────────▶ answers ───┴─▶ compare tokens, and log-probabilities bit by bit
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from whalepod.core.errors import InternalError, ServingError
from whalepod.core.ids import mint_request_id
from whalepod.engine.interface import Fidelity, SampledToken
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.config import ModelConfig
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc

from .canary_cases import CanaryCase, Shape, Warmth, plan_cases
from .canary_control import ControlCluster, run_handoff
from .canary_report import Answer, CanaryReport, answer_of_tokens, note_difference
from .config import ClusterConfig
from .error_codes import error_from_rpc
from .peer_tls import PeerTls
from .registration import RankRole
from .registry import RegistryWatcher
from .router_channel import key_metadata, open_router_channel
from .wire import FIDELITIES, sampling_to_proto

AT_A_TIME: Final = 8
REQUEST_TIMEOUT_S: Final = 300.0

Oracle = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], Sequence[Sequence[SampledToken]]]
"""Prompts and how to sample to the tokens of each. Blocks."""


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    requests: int
    fidelity: Fidelity
    warm: bool
    seed: int = 0
    api_key: str | None = field(default=None, repr=False)
    """What is shown to the router; None: it wants no key."""


async def run_canary(
    config: ClusterConfig, plan: CanaryPlan, oracle: Oracle, *, say: Callable[[str], None]
) -> CanaryReport:
    """Ask the running cluster of `config`, ask the oracle, compare. Raises UnavailableError without a cluster."""
    shape = shape_of(config)
    cases = plan_cases(shape, count=plan.requests, warm=plan.warm, seed=plan.seed)
    report = CanaryReport(requests=len(cases))
    say(f"asking the cluster: {len(cases)} requests")
    answers = await _ask_cluster(config, cases, plan, report)
    say("running the control: a hand-off with zeroed windows")
    control = await _run_control(config, shape, plan)
    say("asking the oracle: the same requests, one process, no store")
    asked = [case for case in cases if case.index in answers] + [control.case]
    drawn = await asyncio.to_thread(oracle, [case.prompt_ids for case in asked], [case.sampling for case in asked])
    truth = {case.index: answer_of_tokens(tokens) for case, tokens in zip(asked, drawn, strict=True)}
    for case in asked[:-1]:
        compare(case, answers[case.index], truth[case.index], report)
    judge_control(control, truth[control.case.index], report)
    return report


def compare(case: CanaryCase, answer: Answer, truth: Answer, report: CanaryReport) -> None:
    """Count one request's differences."""
    report.handed_off += bool(answer.prefill_rank)
    report.cached += answer.cached_tokens > 0
    label = (
        f"request {case.index} ({case.warmth.value}, {len(case.prompt_ids)} prompt tokens, "
        f"{answer.cached_tokens} cached)"
    )
    note_difference(label, answer, truth, report)


@dataclass(frozen=True, slots=True)
class Control:
    """One request handed off twice: untouched, and with its windows zeroed."""

    case: CanaryCase
    untouched: Answer
    zeroed: Answer


def judge_control(control: Control, truth: Answer, report: CanaryReport) -> None:
    """Seen only if the spoilt hand-off differs and the untouched one, which went the same way, does not."""
    differs = (control.zeroed.token_ids, control.zeroed.logprob_bits) != (truth.token_ids, truth.logprob_bits)
    report.control_seen = differs and control.untouched.token_ids == truth.token_ids


def shape_of(config: ClusterConfig) -> Shape:
    """Where the served model's behaviour changes."""
    model = ModelConfig.from_dir(config.model_dir)
    image_ids = frozenset() if model.image_token_id is None else frozenset({model.image_token_id})
    return Shape(
        block_tokens=config.engine.block_tokens or model.block_tokens,
        kept_rows=model.kept_rows,
        window=model.window,
        chunk_tokens=config.prefill.chunk_tokens,
        group_tokens=model.group_tokens,
        context_tokens_max=min(config.engine.context_tokens_max or model.max_position_embeddings, 4096),
        vocabulary=model.vocab_size,
        never_ids=image_ids | {model.dspark_noise_token_id},
    )


async def _ask_cluster(
    config: ClusterConfig, cases: Sequence[CanaryCase], plan: CanaryPlan, report: CanaryReport
) -> dict[int, Answer]:
    """Answers by case index. Failed requests are counted and left out."""
    slots = asyncio.Semaphore(AT_A_TIME)
    answers: dict[int, Answer] = {}
    async with open_router_channel(config) as channel:

        async def ask(case: CanaryCase) -> None:
            salt = mint_request_id().hex()
            async with slots:
                try:
                    if case.primer:
                        primed = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
                        await _generate(channel, case.primer, primed, plan, salt)
                    answers[case.index] = await _generate(channel, case.prompt_ids, case.sampling, plan, salt)
                except ServingError as error:
                    report.failed += 1
                    report.errors.append(f"request {case.index}: {type(error).__name__}: {error}")

        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(ask(case))
    return answers


async def _generate(
    channel: grpc.aio.Channel, prompt_ids: Sequence[int], sampling: SamplingParams, plan: CanaryPlan, salt: str
) -> Answer:
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=prompt_ids),
        sampling=sampling_to_proto(sampling),
        cache_salt=salt,
        fidelity=FIDELITIES[plan.fidelity],
    )
    try:
        reply = await router_pb2_grpc.RouterServiceStub(channel).Generate(
            request, timeout=REQUEST_TIMEOUT_S, metadata=key_metadata(plan.api_key)
        )
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return Answer(
        token_ids=tuple(reply.token_ids),
        logprob_bits=tuple(struct.pack("<f", logprob) for logprob in reply.logprobs),
        prefill_rank=reply.route.prefill_rank,
        cached_tokens=reply.usage.cached_tokens,
    )


async def _run_control(config: ClusterConfig, shape: Shape, plan: CanaryPlan) -> Control:
    """On a prompt of several blocks, whose windows are all in use."""
    case = plan_cases(shape, count=1, warm=False, seed=plan.seed + 1)[0]
    case = CanaryCase(-1, Warmth.COLD, case.prompt_ids, case.sampling)
    secret, tls = config.cluster_secret(), PeerTls.of(config.tls)
    watcher = RegistryWatcher(redis_url=config.redis_url_or_embedded, secret=secret, tls=tls)
    try:
        await watcher.poll()
        ranks = list(watcher.ranks.values())
    finally:
        await watcher.stop()
    prefill = next((rank for rank in ranks if rank.role.is_prefill), None)
    decode = next((rank for rank in ranks if rank.role is RankRole.DECODE), None)
    if prefill is None or decode is None:
        raise InternalError("the control needs a prefill rank and a decode rank")
    cluster = ControlCluster(
        prefill, decode, secret, config.redis_url_or_embedded, block_tokens=shape.block_tokens, tls=tls
    )
    untouched = await run_handoff(cluster, case, fidelity=plan.fidelity, zero_windows=False)
    zeroed = await run_handoff(cluster, case, fidelity=plan.fidelity, zero_windows=True)
    return Control(case, answer_of_tokens(untouched), answer_of_tokens(zeroed))
