"""A decode rank dies under streams of every kind, in a cluster with a spare: their clients notice a pause at most."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster
from tests.e2e.test_pool import decode_ranks
from whalepod.cluster.config import METRICS_PORT_OFFSET
from whalepod.core.clock import Deadline

pytestmark = pytest.mark.slow

PROMPT = "The whale swam on, and the sea was quiet about it. " * 6
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 10, "maxLength": 20},
        "seen": {"type": "array", "items": {"enum": [1, 22, 333], "type": "integer"}, "minItems": 6, "maxItems": 8},
    },
    "required": ["name", "seen"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def spared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    flags = ("--decode-replicas", "2", "--decode-cpus", "0.2", "--prefill-cpus", "0.2", "--drain-seconds", "1")
    with served_cluster(tmp_path_factory.mktemp("spared"), *flags) as cluster:
        yield cluster


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Greedy, drawn with a seed, penalised, by a JSON schema, and a tool call."""
    ids = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPT + "Answer in json."}],
        "thinking": {"type": "disabled"},
        "max_tokens": 300,
        "seed": 3,
    }
    form = {"type": "json_schema", "json_schema": {"name": "whale", "strict": True, "schema": SCHEMA}}
    tool = {"type": "function", "function": {"name": "note", "parameters": SCHEMA, "strict": True}}
    return [
        ("/v1/completions", {**ids, "temperature": 0}),
        ("/v1/completions", {**ids, "temperature": 1, "seed": 7}),
        ("/v1/completions", {**ids, "temperature": 0, "frequency_penalty": 0.8, "repetition_penalty": 1.2}),
        ("/v1/chat/completions", {**chat, "response_format": form}),
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}),
    ]


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any], began: asyncio.Event) -> str:
    """All that the client is told, without ids and times. Fails on an error or a missing end."""
    told: list[Any] = []
    async with http.stream("POST", path, json={**body, "fidelity": "exact", "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return _joined(told)
            if data:
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                told += chunk["choices"]
                if len(told) > 5:
                    began.set()
    raise AssertionError("the stream broke off")


def _joined(choices: list[dict[str, Any]]) -> str:
    """Texts, log-probabilities, calls and the end, whatever the chunks were."""
    parts: dict[str, list[Any]] = {}
    for choice in choices:
        delta = choice.get("delta") or {}
        for call in delta.get("tool_calls") or ():
            parts.setdefault("call", []).append(call["function"].get("arguments") or "")
        parts.setdefault("text", []).append(choice.get("text") or delta.get("content") or "")
        parts.setdefault("logprobs", []).extend((choice.get("logprobs") or {}).get("token_logprobs") or ())
        parts.setdefault("finish", []).append(choice.get("finish_reason") or "")
    joined = {name: "".join(values) for name, values in parts.items() if name != "logprobs"}
    return json.dumps({**joined, "logprobs": parts.get("logprobs")})


async def answers(cluster: ServedCluster, *, victim: int | None, how: signal.Signals) -> list[str]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as http:
        began = [asyncio.Event() for _ in bodies()]
        asking = [
            asyncio.create_task(streamed(http, path, body, event))
            for (path, body), event in zip(bodies(), began, strict=True)
        ]
        if victim is not None:
            await asyncio.gather(*(event.wait() for event in began[:3]))
            pid = cluster.pid_on_port(cluster.config.decode.port + victim)
            os.kill(pid, how)
        return list(await asyncio.gather(*asking))


@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_e13_fault_f4_streams_go_on_elsewhere_with_the_same_text(
    spared: ServedCluster, victim: int, how: signal.Signals
) -> None:
    """E10, E15 and F3 with it: nothing looks finished early, seeds hold, and a rank that is told to stop hands over.
    Its process ends, and another one takes its place."""
    port = spared.config.decode.port + victim
    pid = spared.pid_on_port(port)
    truth = asyncio.run(answers(spared, victim=None, how=how))
    assert asyncio.run(answers(spared, victim=victim, how=how)) == truth
    if how is signal.SIGTERM:
        spared.wait_for_line(f"SIGTERM: decode-{victim} drains")
    deadline = Deadline.after(60)
    while psutil.pid_exists(pid) or spared.try_pid_on_port(port) in {None, pid} or decode_ranks(spared) < 2:
        assert not deadline.expired


def figure(port: int, name: str) -> float:
    """Of the rank at a gRPC port; 0: it has none yet."""
    page = httpx.get(f"http://127.0.0.1:{port + METRICS_PORT_OFFSET}/metrics", trust_env=False).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def test_a_long_stream_goes_on_from_what_its_rank_left_before_it_died(spared: ServedCluster) -> None:
    """Killed behind 600 tokens: the other rank computes what followed the last crash snapshot, and not all of them."""
    body = {"prompt": PROMPT, "max_tokens": 640, "ignore_eos": True, "seed": 5, "logprobs": 1, "fidelity": "exact"}
    ports = [spared.config.decode.port + index for index in range(2)]

    def rows(port: int) -> float:
        """Those that follow a snapshot are of tokens that were drawn: a rank counts them as decode."""
        return sum(figure(port, f'whalepod_rank_batch_rows_sum{{phase="{phase}"}}') for phase in ("prefill", "decode"))

    def told(*, kills: bool) -> tuple[list[dict[str, Any]], float]:
        """All that the client is told, and the rows that the rank has computed which ended it."""
        chunks: list[dict[str, Any]] = []
        before = {port: rows(port) for port in ports}
        survivor = ports[0]
        with (
            spared.client() as http,
            http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
        ):
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    chunks += json.loads(data)["choices"]
                if kills and sum(len((one["logprobs"] or {}).get("tokens", ())) for one in chunks) > 600:
                    kills = False
                    survivor, victim = sorted(ports, key=lambda port: figure(port, "whalepod_rank_running"))
                    spared.kill_on_port(victim)
        return chunks, rows(survivor) - before[survivor]

    truth, _ = told(kills=False)
    again, computed = told(kills=True)
    assert _joined(again) == _joined(truth)
    assert 0 < computed < 300, "600 and more without it"
