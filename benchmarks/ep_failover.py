"""What a lost rank costs an expert-parallel decode pool: streams that go on in place, and for how long they pause.

    python benchmarks/ep_failover.py [--signal KILL|STOP|HEAD] [--ranks 8] [--streams 32] [--tokens N] [--model DIR]

Starts a cluster of its own: one prefill rank, and a decode pool of 8 processes that share the experts. While all
streams generate, one decode rank is killed (KILL), stopped so that it hangs (STOP), or Ray's head is killed (HEAD).
Every answer is compared, token by token, with one process that holds all experts (`exact`).

    in_place   right to the last token, on the rank where it began      broken    an error, or a wrong or missing token
    pause_s    the longest time without a token on a stream that went on in place, beside the longest before the fault

The last line is one JSON object: `streams`, `in_place`, `broken`, `pause_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from whalepod.client import AsyncClient
from whalepod.cluster.config import ClusterConfig, join_address
from whalepod.cluster.free_ports import SEARCH_FROM, with_free_ports
from whalepod.cluster.group_peers import GroupPeers
from whalepod.cluster.local import running_cluster
from whalepod.cluster.pool_settings import DecodeSettings, PrefillSettings
from whalepod.cluster.registry import RegistryWatcher
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.errors import ServingError
from whalepod.engine.interface import Fidelity
from whalepod.engine.llm import LLM
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

PROMPT_TOKENS = 24
TOKENS_BEFORE = 6
"""Of every stream, before the fault."""
REJOIN_PATIENCE_S = 60.0


@dataclass
class Stream:
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    rank: str = ""
    attempts: int = 0
    error: str = ""

    def longest_pause_s(self, start_s: float, end_s: float) -> float:
        """Between two tokens, of which the second came within this time."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((after - before for before, after in pairs if start_s <= after <= end_s), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", choices=["KILL", "STOP", "HEAD"], default="KILL", help="what happens")
    parser.add_argument("--ranks", type=int, default=8, help="of the decode pool")
    parser.add_argument("--streams", type=int, default=32, help="that generate at a time")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--model", type=Path, help="a checkpoint; default: writes a tiny one")
    asked = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {asked.ranks} decode ranks")
    with tempfile.TemporaryDirectory() as directory:
        model = asked.model or Path(directory) / "model"
        if asked.model is None:
            write_tiny_checkpoint(model)
        draw = random.Random(0)
        streams = [Stream([draw.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]) for _ in range(asked.streams)]
        fault_s = asyncio.run(run(model, streams, asked.signal, ranks=asked.ranks, tokens=asked.tokens))
        wanted = truth(model, streams, tokens=asked.tokens)
    report(streams, wanted, fault_s)


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def truth(model: Path, streams: Sequence[Stream], *, tokens: int) -> list[tuple[int, ...]]:
    llm = LLM(model, fidelity=Fidelity.EXACT)
    outputs = llm.generate([stream.prompt for stream in streams], sampling(tokens))
    llm.close()
    return [output.output.token_ids for output in outputs]


def report(streams: Sequence[Stream], wanted: Sequence[Sequence[int]], fault_s: float) -> None:
    right = [tuple(stream.ids) == tuple(ids) for stream, ids in zip(streams, wanted, strict=True)]
    broken = [stream for stream, is_right in zip(streams, right, strict=True) if not is_right]
    in_place = [s for s, is_right in zip(streams, right, strict=True) if is_right and s.attempts == 1]
    moved = [s for s, is_right in zip(streams, right, strict=True) if is_right and s.attempts > 1]
    for stream in broken[:5]:
        print(f"broken: {len(stream.ids)} tokens on {stream.rank}, {stream.attempts} attempts: {stream.error}")
    end_s = max((stream.times_s[-1] for stream in streams if stream.times_s), default=fault_s)
    before_s = max((s.longest_pause_s(0.0, fault_s) for s in in_place), default=0.0)
    pause_s = max((s.longest_pause_s(fault_s, end_s) for s in in_place), default=0.0)
    moved_s = max((s.longest_pause_s(fault_s, end_s) for s in moved), default=0.0)
    print(
        f"longest pause of streams in place: {pause_s:.2f} s, before the fault {before_s:.2f} s, "
        f"ratio {pause_s / before_s if before_s else 0:.1f}; of the {len(moved)} that moved: {moved_s:.2f} s"
    )
    figures = {
        "streams": len(streams), "in_place": len(in_place), "broken": len(broken), "pause_s": round(pause_s, 3)
    }  # fmt: skip
    print(json.dumps(figures))


async def run(model: Path, streams: Sequence[Stream], fault: str, *, ranks: int, tokens: int) -> float:
    """When the fault came."""
    say = Console(highlight=False, soft_wrap=True).print
    config = ClusterConfig(
        model=str(model),
        log_level="warning",
        prefill=PrefillSettings(cpus=0.1),
        decode=DecodeSettings(
            replicas=ranks,
            slots=max(8, 2 * len(streams) // ranks),
            cpus=0.1,
            expert_parallel=True,
            redundant_experts=ranks,
        ),
    )
    config = with_free_ports(config, search_from=SEARCH_FROM + os.getpid() % 800 * 10)
    async with running_cluster(config, say=say, ready_timeout_s=240.0) as cluster:
        pool = [join_address("127.0.0.1", config.decode.port + index) for index in range(ranks)]
        secret = cluster.config.cluster_secret()
        peers = GroupPeers(pool, index=ranks, secret=secret, clock=SYSTEM_CLOCK)
        await wait_known(cluster.http_url, ranks)
        address = join_address("127.0.0.1", config.router.grpc_port)
        async with AsyncClient(address) as client:
            asking = [asyncio.create_task(ask(client, stream, tokens)) for stream in streams]
            while any(len(stream.ids) < TOKENS_BEFORE and not stream.error for stream in streams):
                await asyncio.sleep(0.05)
            pid = await victim_pid(cluster.config, peers, fair=len(streams) // ranks)
            fault_s = time.perf_counter()
            strike(fault, pid)
            await asyncio.gather(*asking)
            print(f"all streams have ended {time.perf_counter() - fault_s:.1f} s after the fault", flush=True)
        if fault != "HEAD":
            await wait_whole(peers, ranks, fault_s)
        await peers.close()
    return fault_s


async def wait_known(url: str, ranks: int) -> None:
    """Until the router has all ranks in its table, or it would give everything to those that came first."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while (await client.get(f"{url}/readyz")).json()["pools"]["decode"]["ranks"] < ranks:
            await asyncio.sleep(0.1)


async def victim_pid(config: ClusterConfig, peers: GroupPeers, *, fair: int) -> int:
    """Of the decode rank whose load is nearest to the mean: it must have streams to lose."""
    watcher = RegistryWatcher(redis_url=config.redis_url_or_embedded, secret=config.cluster_secret())
    try:
        loads: dict[int, int] = {}
        while not any(loads.values()):
            await watcher.poll()
            ranks = [rank for rank in watcher.ranks.values() if not rank.role.is_prefill]
            loads = {int(rank.rank_id.rpartition("-")[2]): rank.load.running for rank in ranks}
    finally:
        await watcher.stop()
    victim = min((index for index, load in loads.items() if load), key=lambda index: (abs(loads[index] - fair), index))
    print(f"streams of the ranks: {[loads[index] for index in sorted(loads)]}; the victim is rank {victim}")
    answer = await peers.probe(victim)
    assert answer is not None
    return answer.place.pid


def strike(fault: str, pid: int) -> None:
    if fault == "HEAD":
        children = psutil.Process().children(recursive=True)
        (head,) = (process for process in children if process.name() == "gcs_server")
        head.kill()
    else:
        os.kill(pid, signal.SIGKILL if fault == "KILL" else signal.SIGSTOP)
    print(f"{fault} struck process {pid if fault != 'HEAD' else 'gcs_server'}")


async def ask(client: AsyncClient, stream: Stream, tokens: int) -> None:
    try:
        async for delta in client.stream(stream.prompt, sampling=sampling(tokens), fidelity=Fidelity.EXACT):
            if delta.token_ids:
                stream.ids += delta.token_ids
                stream.times_s.append(time.perf_counter())
            stream.rank, stream.attempts = delta.decode_rank or stream.rank, delta.attempts or stream.attempts
    except ServingError as error:
        stream.error = f"{type(error).__name__}: {error}"


async def wait_whole(peers: GroupPeers, ranks: int, fault_s: float) -> None:
    """Until the rank that was lost is back in the group."""
    patience_end_s = time.perf_counter() + REJOIN_PATIENCE_S
    while time.perf_counter() < patience_end_s:
        answer = await peers.probe(0)
        if answer is not None and answer.running and len(answer.members) == ranks:
            print(f"the group is whole again {time.perf_counter() - fault_s:.1f} s after the fault, at the latest")
            return
        await asyncio.sleep(0.2)
    print(f"the rank was not back {time.perf_counter() - fault_s:.1f} s after the fault")


if __name__ == "__main__":
    main()
