"""What is wrong with settings that are each right: said at start, naming both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from whalepod.core.errors import ConfigError
from whalepod.engine.interface import Fidelity
from whalepod.engine.speculation.options import Acceptance
from whalepod.kvstore.settings import StoreAddress

if TYPE_CHECKING:
    from .config import ClusterConfig
    from .pool_settings import DecodeSettings, PrefillSettings


def contradictions(config: ClusterConfig) -> Iterator[str]:
    """A sentence for each two settings that cannot both be."""
    router = config.router
    if config.secret is not None and config.secret_file is not None:
        yield "secret and secret_file are both set: keep one"
    if router.remote_prefill == "always" and config.prefill.replicas == 0:
        yield "router.remote_prefill is always, but prefill.replicas is 0"
    if router.process_count > 1 and router.admin_port is None:
        yield (
            f"router.processes is {router.processes}, but router.admin_port is not set: each process shows its metrics "
            "and its readiness on a port of its own, from there on"
        )
    if router.prefill and not router.decode:
        yield "router.prefill is set without router.decode: addresses are given for both, or for decode alone"
    if router.vision and not router.decode:
        yield "router.vision is set without router.decode: addresses are given for both, or for decode alone"
    if router.api_keys_file is not None and router.trust_tenant_header:
        yield "router.api_keys_file and router.trust_tenant_header are both set: a key says whose tenant it is"
    if router.queue_timeout_seconds > router.request_timeout_seconds:
        yield (
            f"router.queue_timeout_seconds ({router.queue_timeout_seconds:g}) is longer than "
            f"router.request_timeout_seconds ({router.request_timeout_seconds:g})"
        )
    if config.fidelity.default is Fidelity.EXACT and config.dspark.acceptance is Acceptance.REJECTION:
        yield (
            "dspark.acceptance is rejection, but fidelity.default is exact, which says the same with drafts and "
            "without: leave it auto"
        )
    yield from _wrong_store_addresses(config)
    yield from _tls_contradictions(config)
    yield from _rank_host_contradictions(config)
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.blocks is not None and pool.memory_gib is not None:
            yield f"{name}.blocks and {name}.memory_gib are both set: one follows from the other, keep one"
        yield from _gpu_contradictions(name, pool, device=config.engine.device)
        if pool.expert_parallel and pool.replicas % config.eplb.nodes:
            yield f"{name}.replicas is {pool.replicas}, which eplb.nodes ({config.eplb.nodes}) does not divide"
        if pool.redundant_experts and not pool.expert_parallel:
            yield f"{name}.redundant_experts is {pool.redundant_experts}, but {name}.expert_parallel is off"
    yield from _context_contradictions(config)
    if config.vision.gpus and config.engine.device != "cuda":
        yield f"vision.gpus is {config.vision.gpus:g}, but engine.device is {config.engine.device}: set it to cuda"


def _wrong_store_addresses(config: ClusterConfig) -> Iterator[str]:
    urls = [("redis_url", config.redis_url)] if config.redis_url is not None else []
    for setting, url in [*urls, *(("kv.urls", url) for url in config.kv.urls)]:
        try:
            StoreAddress.parse(url)
        except ConfigError as error:
            yield f"{setting}: {error}"
    if config.redis_url is not None and "://" not in config.redis_url:
        yield "redis_url has no scheme: write redis://host:port/0"


def _context_contradictions(config: ClusterConfig) -> Iterator[str]:
    prefill = config.prefill
    size = prefill.context_parallel
    if size == 1:
        return
    if not prefill.replicas or prefill.replicas % size:
        yield f"prefill.replicas is {prefill.replicas}, not groups of prefill.context_parallel ({size})"
    if prefill.expert_parallel:
        yield (
            f"prefill.context_parallel is {size} and prefill.expert_parallel is on: ranks of a pool divide prompts or "
            "share the experts, not both"
        )
    if config.engine.device != "cpu":
        yield (
            f"prefill.context_parallel is {size}, but engine.device is {config.engine.device}: the kernels for packed "
            "caches compute a prompt on one GPU"
        )


def _gpu_contradictions(name: str, pool: PrefillSettings | DecodeSettings, *, device: str) -> Iterator[str]:
    if pool.gpus and device != "cuda":
        yield f"{name}.gpus is {pool.gpus:g}, but engine.device is {device}: a rank with a GPU of its own says cuda"
    if pool.expert_parallel and device != "cpu" and pool.gpus != 1:
        yield (
            f"{name}.expert_parallel is on and engine.device is {device}, but {name}.gpus is {pool.gpus:g}: ranks that "
            "share the experts have a GPU each, so it must be 1"
        )


def _rank_host_contradictions(config: ClusterConfig) -> Iterator[str]:
    if config.ray.one_node and config.ranks_apart:
        yield "ray.one_node and ranks_apart are both on: ranks of a pool share a machine, or none do"
    if config.rank_host is not None and not config.ranks_apart:
        yield "rank_host is set, but ranks_apart is off: only ranks with an address of their own have such hosts"
    if config.rank_host is not None:
        try:
            first, second = (config.rank_host.format(pool="decode", index=index) for index in range(2))
        except (IndexError, KeyError, ValueError):
            yield f"rank_host is {config.rank_host}: only {{pool}} and {{index}} stand for something in it"
        else:
            if first == second:
                yield f"rank_host is {config.rank_host}, the same for every rank: write {{index}} where its number goes"
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.expert_parallel and pool.replicas > 1 and config.ranks_apart and config.rank_host is None:
            yield f"{name}.expert_parallel and ranks_apart are on, so ranks must find each other: set rank_host"
    if config.prefill.context_parallel > 1 and config.ranks_apart and config.rank_host is None:
        yield (
            f"prefill.context_parallel is {config.prefill.context_parallel} and ranks_apart is on, so ranks must find "
            "each other: set rank_host"
        )


def _tls_contradictions(config: ClusterConfig) -> Iterator[str]:
    tls = config.tls
    if (tls.cert_file is None) != (tls.key_file is None):
        yield "tls.cert_file and tls.key_file go together: set both, or neither"
    peer = {"cert_file": tls.peer_cert_file, "key_file": tls.peer_key_file, "ca_file": tls.peer_ca_file}
    missing = [f"tls.peer_{name}" for name, file in peer.items() if file is None]
    if 0 < len(missing) < len(peer):
        yield f"tls.peer_cert_file, tls.peer_key_file and tls.peer_ca_file go together: set {' and '.join(missing)} too"
    if tls.peer_name is not None and tls.peer_cert_file is None:
        yield "tls.peer_name is set without tls.peer_cert_file: nobody shows a certificate"
    if tls.client_ca_file is not None and tls.cert_file is None:
        yield "tls.client_ca_file is set without tls.cert_file: only a TLS server can ask for certificates"
    if tls.client_ca_file is not None and config.router.admin_port is None:
        yield "tls.client_ca_file is set without router.admin_port: health checks have no certificate to show"


def port_clashes(config: ClusterConfig) -> Iterator[str]:
    """A sentence for each port that is no port, or is wanted twice."""
    seen: dict[int, str] = {}
    for setting, port in config.ports().items():
        if port > 65535:
            yield f"{setting} is {port}: ports end at 65535"
        elif port in seen:
            yield f"{seen[port]} and {setting} are both port {port}"
        seen[port] = setting
