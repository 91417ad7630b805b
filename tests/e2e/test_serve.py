"""`whalepod serve` without a word, from the printed curl line to the last process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster, start_serving
from whalepod.cluster.shipped_model import shipped_model_dir
from whalepod.core.ids import mint_request_id
from whalepod.model.config import ModelConfig

PROMPT = "It was a bright cold day, and the clocks were striking. " * 16


@pytest.fixture(scope="module", name="cluster")
def cluster_of_the_shipped_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    flags = ("--log-level", "warning")
    with served_cluster(tmp_path_factory.mktemp("serve"), *flags, shipped_model=True) as cluster:
        yield cluster


def completion(cluster: ServedCluster, prompt: str = PROMPT, **fields: object) -> dict[str, object]:
    body = {"model": "whalepod-tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    with cluster.client() as client:
        response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_curl_line_works_as_printed_and_streams(cluster: ServedCluster) -> None:
    words = shlex.split(cluster.wait_for_line("^ *curl "))
    printed = subprocess.run([*words, "-s", "--max-time", "60"], capture_output=True, text=True, check=True).stdout
    chunks = [line.removeprefix("data: ") for line in printed.splitlines() if line]
    assert chunks[-1] == "[DONE]"
    assert len(chunks) > 4
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[:-1]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert "language model" in text or "test model" in text, "it has learned what it is"
    assert json.loads(chunks[-2])["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_same_prompt_twice_is_a_hit_up_to_the_kept_rows_and_the_same_answer(cluster: ServedCluster) -> None:
    salt = mint_request_id().hex()
    first = completion(cluster, cache_salt=salt, fidelity="exact")
    second = completion(cluster, cache_salt=salt, fidelity="exact")
    usage = first["usage"], second["usage"]
    assert isinstance(usage[0], dict)
    assert isinstance(usage[1], dict)
    length = usage[1]["prompt_tokens"]
    config = ModelConfig.from_dir(shipped_model_dir())
    block_tokens, kept_rows = config.block_tokens, config.kept_rows
    assert length > 2 * block_tokens + kept_rows
    assert usage[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] == (length - kept_rows) // block_tokens * block_tokens
    assert first["choices"] == second["choices"]


def test_the_published_clients_are_served_unmodified(cluster: ServedCluster) -> None:
    """The smoke of `test_clients.py`."""
    user: Any = [{"role": "user", "content": "Hello"}]
    off: Any = {"type": "disabled"}
    asked: Any = {"model": "whalepod-tiny", "messages": user, "max_tokens": 4}
    oai = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    whole: Any = oai.chat.completions.create(**asked, temperature=0, extra_body={"thinking": off})
    chunks: Any = oai.chat.completions.create(**asked, temperature=0, extra_body={"thinking": off}, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    response = oai.responses.create(model="whalepod-tiny", input="Hello", max_output_tokens=4)
    assert response.usage is not None
    assert response.usage.output_tokens == 4
    with anthropic.Anthropic(base_url=cluster.url, api_key="none").messages.stream(**asked, thinking=off) as stream:
        assert stream.get_final_message().usage.output_tokens == 4


def test_a_second_serve_says_that_one_is_running_and_ends_with_1(cluster: ServedCluster) -> None:
    second = subprocess.run(
        cluster.arguments, env=cluster.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 1
    assert f"already serves on port {cluster.config.router.http_port}" in second.stdout
    assert str(cluster.process.pid) in second.stdout


def test_a_port_in_use_by_another_program_is_named(cluster: ServedCluster, tmp_path: Path) -> None:
    elsewhere = {**cluster.environment, "XDG_STATE_HOME": str(tmp_path)}
    refused = subprocess.run(cluster.arguments, env=elsewhere, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert f"port {cluster.config.decode.port} (decode.port + 0) is in use" in refused.stdout


def test_status_shows_every_rank(cluster: ServedCluster) -> None:
    command = [*cluster.arguments[:3], "status", "--http-port", str(cluster.config.router.http_port)]
    shown = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for rank in ("prefill-0", "decode-0"):
        assert any(rank in line and "serving" in line for line in shown.stdout.splitlines()), shown.stdout


@pytest.mark.slow
def test_ctrl_c_while_starting_or_serving_ends_everything_and_nothing_else(
    cluster: ServedCluster, tmp_path: Path
) -> None:
    before = cluster.descendants()
    other = start_serving(tmp_path, "--log-level", "warning")
    other.wait_for_line("^starting ranks")
    started = other.descendants()
    os.killpg(other.process.pid, signal.SIGINT)  # what a terminal does
    assert other.process.wait(60) == 0
    _, alive = psutil.wait_procs(started, timeout=15)
    assert not alive
    assert cluster.process.poll() is None
    assert all(process.is_running() for process in before)
