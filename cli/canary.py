"""`whalepod canary`: are a cluster's tokens the model's?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from prometheus_client import start_http_server
from rich.console import Console

from whalepod.cluster.canary import CanaryPlan, Oracle, run_canary
from whalepod.cluster.canary_images import ChatOracle, Message, run_image_canary
from whalepod.cluster.canary_report import CanaryReport
from whalepod.cluster.canary_watch import watch
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import load_config
from whalepod.cluster.free_ports import SEARCH_FROM, with_free_ports
from whalepod.cluster.local import running_cluster
from whalepod.cluster.serve_lock import serving_record
from whalepod.core.errors import UnavailableError
from whalepod.engine.interface import Fidelity, SampledToken
from whalepod.engine.sampling_params import SamplingParams

from .chat import ApiKey
from .cluster_options import with_known_cluster
from .serve import with_model
from .status import served_here_unless_named
from .user_dirs import state_dir

if TYPE_CHECKING:
    from whalepod.engine.llm import LLM
    from whalepod.engine.llm_outputs import RequestOutput


class Dspark(StrEnum):
    ON = "on"
    OFF = "off"


class Role(StrEnum):
    FULL = "full"
    ENCODER = "encoder"


@with_known_cluster
def canary(
    config: ClusterConfig,
    requests: Annotated[int, typer.Option(min=1, help="Requests to compare.")] = 64,
    role: Annotated[Role | None, typer.Option(help="Role of the prefill ranks; default: prefill.role.")] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Compare requests that meet stored state.")] = False,
    fidelity: Annotated[Fidelity, typer.Option(help="What is asked for.")] = Fidelity.EXACT,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same requests.")] = 0,
    dspark: Annotated[
        Dspark | None, typer.Option(help="Whether decode ranks draft; default: as dspark.draft_tokens says.")
    ] = None,
    every: Annotated[
        float | None, typer.Option(min=1, help="Go on for ever, a round every so many seconds, beside a cluster.")
    ] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Compare conversations with images, each asked twice.")
    ] = False,
    api_key: ApiKey = None,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="With --every: where /metrics is.")] = 9500,
) -> None:
    """Compare the cluster that serves here, or a small one of its own, with one process that has no store and drafts
    nothing.

    Compares tokens and every token's log-probability bit by bit. The last line it prints is one JSON object of figures.
    With --every it goes on until it is told to stop, and tells what it finds in metrics.
    """
    console = Console(highlight=False, soft_wrap=True)
    plan = CanaryPlan(requests=requests, fidelity=fidelity, warm=warm, seed=seed, api_key=api_key)
    if images and (every is not None or warm):
        raise typer.BadParameter("--images goes with neither --every nor --warm")
    if every is not None:
        watched = served_here_unless_named(config, console)
        start_http_server(metrics_port, addr=watched.host)
        console.print(f"a round of {requests} requests every {every:g} s; metrics on port {metrics_port}")
        asyncio.run(_watch(watched, plan, every))
        return
    try:
        report = asyncio.run(_run(config, role, dspark, plan, console, images=images))
    except UnavailableError as error:
        console.print(f"whalepod: {error}")
        raise typer.Exit(1) from None
    for line in report.errors[:10]:
        console.print(line)
    console.print(json.dumps(report.figures()))
    if not passed(report, plan):
        raise typer.Exit(1)


def passed(report: CanaryReport, plan: CanaryPlan) -> bool:
    """Warm requests in `fast` are approximate by design: their differences are reported, and are no failure."""
    exact = plan.fidelity is Fidelity.EXACT
    same = report.different == 0 and (report.logprob_different == 0 or not exact)
    was_warm = report.cached > 0 or not plan.warm
    return report.control_seen and report.failed == 0 and was_warm and (same or (plan.warm and not exact))


async def _watch(config: ClusterConfig, plan: CanaryPlan, every_s: float) -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    oracle = _oracle(config, plan.fidelity)

    async def run(plan: CanaryPlan) -> CanaryReport:
        return await run_canary(config, plan, oracle, say=lambda _: None)

    await watch(plan, run, passed, every_s=every_s, stop=stop)


async def _run(
    config: ClusterConfig,
    role: Role | None,
    dspark: Dspark | None,
    plan: CanaryPlan,
    console: Console,
    *,
    images: bool,
) -> CanaryReport:
    async with _cluster(config, role or Role(config.prefill.role), dspark, console) as running:
        if images:
            return await run_image_canary(
                running,
                requests=plan.requests,
                fidelity=plan.fidelity,
                seed=plan.seed,
                oracle=_chat_oracle(running, plan.fidelity),
                say=console.print,
                api_key=plan.api_key,
            )
        return await run_canary(running, plan, _oracle(running, plan.fidelity), say=console.print)


@contextlib.asynccontextmanager
async def _cluster(
    config: ClusterConfig, role: Role, dspark: Dspark | None, console: Console
) -> AsyncGenerator[ClusterConfig]:
    """The settings of the cluster that serves here, if it fits; else of one that lives as long as the block."""
    record = serving_record(state_dir(), config.router.http_port)
    if record is not None:
        served = load_config(file=Path(record.config_file))
        same_model = config.model is None or config.model_dir == served.model_dir
        same_drafts = dspark is None or (dspark is Dspark.ON) == (served.dspark.draft_tokens != 0)
        if served.prefill.role == role.value and same_model and same_drafts:
            console.print(f"using the cluster at {record.http_url}")
            yield served
            return
        console.print(f"the cluster at {record.http_url} is not what was asked for; starting one beside it")
    own = with_model(_with_dspark(config, dspark), say=console.print)
    always = own.router.model_copy(update={"remote_prefill": "always"})
    prefill = own.prefill.model_copy(update={"role": role.value})
    own = own.model_copy(update={"router": always, "prefill": prefill, "redis_url": None, "log_level": "warning"})
    # Two canaries that start together begin to search at different ports.
    own = with_free_ports(own, search_from=SEARCH_FROM + os.getpid() % 800 * 10)
    async with running_cluster(own, say=console.print) as cluster:
        yield cluster.config


def _with_dspark(config: ClusterConfig, wanted: Dspark | None) -> ClusterConfig:
    if wanted is None:
        return config
    drafts = 0 if wanted is Dspark.OFF else config.dspark.draft_tokens or None
    return config.model_copy(update={"dspark": config.dspark.model_copy(update={"draft_tokens": drafts})})


def _oracle(config: ClusterConfig, fidelity: Fidelity) -> Oracle:
    def ask(prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Sequence[SampledToken]]:
        return _tokens(_llm(config, fidelity).generate(prompts, sampling))

    return ask


def _chat_oracle(config: ClusterConfig, fidelity: Fidelity) -> ChatOracle:
    def ask(
        conversations: Sequence[Sequence[Message]], sampling: Sequence[SamplingParams]
    ) -> list[Sequence[SampledToken]]:
        return _tokens(_llm(config, fidelity).chat(conversations, sampling))

    return ask


def _llm(config: ClusterConfig, fidelity: Fidelity) -> LLM:
    from whalepod.engine.llm import LLM

    return LLM(
        config.model_dir,
        block_tokens=config.engine.block_tokens,
        fidelity=fidelity,
        context_tokens_max=config.engine.context_tokens_max,
        chunk_tokens=config.prefill.chunk_tokens,
        quantized_caches=config.engine.quantized_caches,
        threads=config.engine.threads,
        cpu_operators=config.engine.cpu_operators,
        launch_table_file=config.engine.launch_table_file,
        device=config.engine.device,
        draft_tokens=0,
    )


def _tokens(outputs: Sequence[RequestOutput]) -> list[Sequence[SampledToken]]:
    """Raises the first error."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.output.tokens for output in outputs]
