"""Settings that cannot work together are refused at start, with a sentence that names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import load_config
from whalepod.cluster.pool_settings import PrefillSettings
from whalepod.cluster.pools import bundle, rank_places
from whalepod.cluster.rank_group import computes_in_group, group_addresses
from whalepod.cluster.registration import RankRole
from whalepod.core.errors import ConfigError

CONTRADICTIONS: list[tuple[dict[str, str], str, str]] = [
    ({"--secret": "x" * 16, "--secret-file": "f"}, "secret", "secret_file"),
    ({"--remote-prefill": "always", "--prefill-replicas": "0"}, "router.remote_prefill", "prefill.replicas"),
    (
        {"--queue-timeout-seconds": "9", "--request-timeout-seconds": "3"},
        "router.queue_timeout_seconds (9)",
        "router.request_timeout_seconds (3)",
    ),
    ({"--decode-blocks": "9", "--decode-memory-gib": "3"}, "decode.blocks", "decode.memory_gib"),
    ({"--fidelity-default": "exact", "--fidelity-allowed": "fast"}, "fidelity.default", "fidelity.allowed"),
    (
        {"--fidelity-default": "exact", "--dspark-acceptance": "rejection"},
        "dspark.acceptance is rejection",
        "fidelity.default is exact",
    ),
    ({"--http-port": "8100"}, "http_port", "prefill.port"),
    (
        {"--engine-device": "cuda", "--decode-expert-parallel": "true"},
        "decode.expert_parallel is on and engine.device is cuda",
        "decode.gpus is 0",
    ),
    (
        {"--decode-expert-parallel": "true", "--decode-replicas": "3", "--eplb-nodes": "2"},
        "decode.replicas is 3",
        "eplb.nodes (2)",
    ),
    ({"--rank-host": "rank-{index}"}, "rank_host", "ranks_apart"),
    ({"--rank-host": "rank-{number}", "--ranks-apart": "true"}, "rank-{number}", "{index}"),
    ({"--rank-host": "{pool}", "--ranks-apart": "true"}, "rank_host", "{index}"),
    (
        {"--decode-expert-parallel": "true", "--decode-replicas": "2", "--ranks-apart": "true"},
        "decode.expert_parallel",
        "rank_host",
    ),
    (
        {"--prefill-context-parallel": "2", "--prefill-replicas": "3"},
        "prefill.replicas is 3",
        "prefill.context_parallel (2)",
    ),
    ({"--prefill-context-parallel": "2", "--prefill-replicas": "0"}, "prefill.replicas is 0", "context_parallel (2)"),
    (
        {"--prefill-context-parallel": "2", "--prefill-replicas": "2", "--prefill-expert-parallel": "true"},
        "prefill.context_parallel is 2",
        "prefill.expert_parallel",
    ),
    (
        {"--prefill-context-parallel": "2", "--prefill-replicas": "2", "--engine-device": "cuda"},
        "prefill.context_parallel is 2",
        "engine.device is cuda",
    ),
    (
        {"--prefill-context-parallel": "2", "--prefill-replicas": "2", "--ranks-apart": "true"},
        "prefill.context_parallel is 2",
        "rank_host",
    ),
    ({"--ray-one-node": "true", "--ranks-apart": "true"}, "ray.one_node", "ranks_apart"),
    ({"--prefill-gpus": "1"}, "prefill.gpus is 1", "engine.device is cpu"),
    ({"--prefill-gpus": "1", "--engine-device": "cuda:1"}, "prefill.gpus is 1", "engine.device is cuda:1"),
    ({"--decode-port": "8102", "--prefill-replicas": "4"}, "prefill.port + 2", "decode.port + 0"),
    ({"--redis-port": "9201"}, "redis_port", "decode.port"),
    ({"--decode-port": "65000"}, "decode.port", "65535"),
    ({"--redis-url": "rediss://store:6379"}, "redis_url", "no TLS to the store"),
    ({"--redis-url": "store:6379"}, "redis_url", "redis://"),
    ({"--redis-url": "redis://store", "--kv-urls": "redis://a,redis://b:x"}, "kv.urls", "not a number"),
]


@pytest.mark.parametrize(("flags", "first", "second"), CONTRADICTIONS)
def test_contradictions_are_refused_and_both_settings_named(flags: dict[str, str], first: str, second: str) -> None:
    if "--redis-port" in flags:
        flags = {**flags, "--decode-replicas": "2"}
    with pytest.raises(ConfigError) as refusal:
        load_config(flags=flags)
    assert first in str(refusal.value)
    assert second in str(refusal.value)


def test_an_external_redis_frees_the_embedded_port() -> None:
    config = load_config(flags={"--redis-url": "redis://store:6379", "--http-port": "6380"})
    assert config.redis_url_or_embedded == "redis://store:6379"


def test_the_defaults_are_consistent_and_hold_no_model_and_no_secret() -> None:
    config = ClusterConfig()
    with pytest.raises(ConfigError, match="--model"):
        _ = config.model_dir
    with pytest.raises(ConfigError, match="secret_file"):
        config.cluster_secret()


def test_the_served_name_is_the_directory_unless_it_is_set(tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": str(tmp_path / "whale-1")}
    assert ClusterConfig(**values).model_name == "whale-1"
    assert ClusterConfig(**values, served_model_name="whale").model_name == "whale"


def test_a_secret_is_read_from_its_file_without_the_newline(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    assert ClusterConfig(secret_file=file).cluster_secret().key == b"0123456789abcdef"


def test_a_short_secret_is_refused_and_not_shown() -> None:
    config = ClusterConfig(secret=SecretStr("hush"))
    with pytest.raises(ConfigError, match="at least 16 bytes") as refusal:
        config.cluster_secret()
    assert "hush" not in str(refusal.value)
    assert "hush" not in repr(config)


def test_what_is_written_down_holds_no_secret_and_reads_back() -> None:
    config = ClusterConfig(secret=SecretStr("0123456789abcdef"), model="m")
    written = config.without_secret().model_dump_json()
    assert "0123456789abcdef" not in written
    again = ClusterConfig.model_validate_json(written).with_secret("0123456789abcdef")
    assert again.cluster_secret() == config.cluster_secret()


def test_ray_reserves_the_gpus_of_a_rank() -> None:
    flags = {"--engine-device": "cuda", "--decode-expert-parallel": "true", "--decode-gpus": "1", "--decode-cpus": "2"}
    config = load_config(flags=flags)
    assert bundle(config, "decode") == {"CPU": 2, "GPU": 1}
    assert bundle(config, "prefill") == {"CPU": 1}
    own = load_config(flags={**flags, "--ray-pool-resources": "true"})
    assert bundle(own, "decode") == {"CPU": 2, "GPU": 1, "whalepod_decode": 1}


def test_the_first_rank_of_each_group_has_its_prompts_and_finds_the_others() -> None:
    prefill = PrefillSettings(replicas=4, context_parallel=2)
    config = ClusterConfig(prefill=prefill)
    roles = [config.prefill_role(index) for index in range(4)]
    assert roles == [RankRole.PREFILL_FULL, RankRole.PREFILL_MEMBER] * 2
    assert [role.pool for role in roles] == ["prefill"] * 4
    assert [role.is_prefill for role in roles] == [True, False] * 2
    taking = [place.rank_id for place in rank_places(config) if place.takes_requests(config)]
    assert taking == ["prefill-0", "prefill-2", "decode-0"]
    assert computes_in_group(config, pool="prefill")
    assert not computes_in_group(config, pool="decode")
    assert group_addresses(config, "prefill", 3) == (["127.0.0.1:8102", "127.0.0.1:8103"], 1)
