"""Settings of a cluster: one model, checked together at start, read by every process of it.

Each field is one setting, with one YAML key, one `WHALEPOD_*` variable and one flag (`config_sources.py` derives the
three names and reads them). Bad values and contradictions are refused before anything starts, naming the settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import ConfigError
from whalepod.engine.interface import Fidelity

from .config_checks import contradictions, port_clashes
from .dspark_settings import DsparkSettings
from .pool_settings import DecodeSettings, Port, PrefillSettings, Section, VisionSettings
from .registration import RankRole
from .usable_cores import usable_cores

METRICS_PORT_OFFSET = 1000
"""A rank serves its metrics at its gRPC port plus this."""
DIRECT_PORT_OFFSET = 2000
"""A prefill rank serves what it has published to other ranks at its gRPC port plus this."""
RETENTION_HOURS = {"session": 1, "day": 24, "week": 168}
"""Retention classes (`kvstore.md` §7.3)."""

ROUTER_PROCESSES_MAX = 64
AUTO_CORES_A_PROCESS = 4
"""One process fills one core. The others are for the kernel's side of its connections, for Redis and for ranks."""
AUTO_PROCESSES_MAX = 8
"""About 11,000 requests or 190,000 tokens a second (benchmarks/notes/router.md): more than comes to one router."""


def _number_of_processes(value: object) -> object:
    """Raises ValueError, which says all that it may be."""
    text = str(value)
    if text == "auto" or (text.isdecimal() and 1 <= int(text) <= ROUTER_PROCESSES_MAX):
        return value
    raise ValueError(f"router.processes must be a number from 1 to {ROUTER_PROCESSES_MAX}, or auto, not {text!r}")


class EngineSettings(Section):
    """What all ranks have in common. Ranks that disagree on `block_tokens` cannot share state."""

    block_tokens: int | None = Field(default=None, ge=1, description="tokens of a KV block; default: the model's")
    context_tokens_max: int | None = Field(
        default=None, ge=1, description="longest prompt plus answer; default: the model's"
    )
    threads: int = Field(
        default=1,
        ge=1,
        description="CPU threads of torch in one rank; results do not depend on it; the compiled operators take one",
    )
    cpu_operators: bool = Field(
        default=True,
        description="compute on a CPU with the compiled operators, where they are there; other bits than without them, "
        "so the ranks of a cluster must agree",
    )
    device: str = Field(default="cpu", description="where ranks compute: `cpu`, `cuda` or `cuda:N`")
    launch_table_file: Path | None = Field(
        default=None, description="kernels' sizes on a GPU, of `whalepod kernels tune`; default: those that come along"
    )
    quantized_caches: bool = Field(
        default=True, description="keep KV as the release does; off: float32, for comparisons"
    )
    kept_rows: int | None = Field(
        default=None, ge=1, description="only checked: kept rows that the model must have; any other number is refused"
    )
    async_scheduling: bool = Field(
        default=True, description="plan a step while the one before it is computed; changes no token"
    )
    warm_up: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="before a rank serves, compile kernels and record decode steps, by requests of its own; auto: on a "
        "GPU; ranks that compute in a group never do",
    )


class FidelitySettings(Section):
    """`fast` approximates where the published engine does; `exact` never does."""

    default: Fidelity = Field(default=Fidelity.FAST, description="for requests that do not say")
    allowed: tuple[Fidelity, ...] = Field(
        default=(Fidelity.FAST, Fidelity.EXACT), description="what a request may ask for"
    )

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Self:
        if self.default not in self.allowed:
            allowed = ", ".join(fidelity.value for fidelity in self.allowed)
            raise ValueError(f"fidelity.default is {self.default.value}, but fidelity.allowed is only {allowed}")
        return self


class RouterSettings(Section):
    """The front door."""

    http_port: Port = Field(default=8000, description="port of the HTTP API")
    grpc_port: Port = Field(default=8001, description="port of the public gRPC API")
    processes: Annotated[int | Literal["auto"], BeforeValidator(_number_of_processes)] = Field(
        default="auto",
        description="router processes that share the ports, the limits, and what they know; operators find the second "
        "at admin_port + 1, and so on; auto: one for each four cores, at most 8, and 1 without admin_port",
    )
    policy: Literal["kv", "least-loaded", "round-robin", "random"] = Field(
        default="kv", description="how requests choose ranks; all but kv are for comparison"
    )
    prefill: tuple[str, ...] = Field(
        default=(), description="addresses of prefill ranks, host:port; default: those in the registry"
    )
    decode: tuple[str, ...] = Field(
        default=(), description="addresses of decode ranks, host:port; default: those in the registry"
    )
    vision: tuple[str, ...] = Field(
        default=(), description="addresses of vision ranks, host:port; default: those in the registry"
    )
    remote_prefill: Literal["auto", "always", "never"] = Field(
        default="auto", description="when a prefill rank runs the prompt"
    )
    remote_prefill_tokens_min: int = Field(
        default=64, ge=1, description="auto: uncached rows from which a prefill rank runs them"
    )
    max_concurrent_requests: int = Field(default=256, ge=1, description="requests past the queue at a time")
    queue_size: int = Field(default=1024, ge=0, description="requests that may wait; more are refused with 429")
    queue_timeout_seconds: float = Field(default=60.0, gt=0, description="longest wait in the queue")
    tenant_requests_per_minute: int | None = Field(
        default=None, ge=1, description="requests that one tenant may send to one router; default: no limit"
    )
    tenant_tokens_per_minute: int | None = Field(
        default=None, ge=1, description="prompt and answer tokens of one tenant at one router; default: no limit"
    )
    tenant_concurrent_requests: int | None = Field(
        default=None, ge=1, description="requests of one tenant at a time at one router; default: no limit"
    )
    priority_min: int | None = Field(
        default=None, description="smallest priority of a request, unless its key has another; default: any, as it asks"
    )
    request_timeout_seconds: float = Field(
        default=600.0, gt=0, description="deadline of a request that does not set one"
    )
    retry_max: int = Field(default=2, ge=0, description="further attempts after one that was lost")
    drain_seconds: float = Field(default=30.0, ge=0, description="how long a stopping process lets its requests finish")
    image_hosts: tuple[str, ...] = Field(
        default=(), description="hosts whose images are fetched though their addresses are private; http will do there"
    )
    trust_tenant_header: bool = Field(
        default=False, description="take the tenant from x-tenant-id, which a proxy has set"
    )
    api_keys_file: Path | None = Field(
        default=None, description="keys that clients must have, as `whalepod keys` writes it; default: anybody may ask"
    )
    admin_port: Port | None = Field(
        default=None, description="plain HTTP for operators: metrics, workers, health; default: on http_port"
    )
    operator_hosts: tuple[str, ...] = Field(
        default=(),
        description="names under which a browser may change ranks without a key, beside addresses and names without a "
        "dot",
    )
    usage_file: Path | None = Field(
        default=None, description="one JSON line for each request and what it used, for billing; default: none"
    )

    @property
    def process_count(self) -> int:
        """What `processes` says; auto: as this machine is now."""
        if self.processes != "auto":
            return self.processes
        if self.admin_port is None:
            return 1
        return max(1, min(AUTO_PROCESSES_MAX, int(usable_cores() / AUTO_CORES_A_PROCESS)))


class TlsSettings(Section):
    """Certificates of the public HTTP and gRPC servers, and of processes of the cluster among themselves. Files are
    read again when they change."""

    cert_file: Path | None = Field(default=None, description="certificate chain, PEM; default: no TLS")
    key_file: Path | None = Field(default=None, description="its private key, PEM")
    client_ca_file: Path | None = Field(
        default=None,
        description="clients must show a certificate of these authorities, PEM; default: none is asked for",
    )
    peer_cert_file: Path | None = Field(
        default=None,
        description="what this process shows to others of its cluster, PEM; default: plain text",
    )
    peer_key_file: Path | None = Field(default=None, description="its private key, PEM")
    peer_ca_file: Path | None = Field(
        default=None, description="authorities that must have signed what the others show, PEM"
    )
    peer_name: str | None = Field(
        default=None, description="name in the others' certificates; default: the host at which each is reached"
    )


class TracingSettings(Section):
    """Spans of requests, across router, prefill, store and decode."""

    otlp_endpoint: str | None = Field(
        default=None, pattern=r"^https?://", description="collector (OTLP over gRPC), http://host:4317; default: none"
    )
    sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="share of traces to record; a client that began one has decided already"
    )


class KvSettings(Section):
    """The store of KV blocks, and what stands beside it."""

    urls: tuple[str, ...] = Field(
        default=(), description="Redis servers that hold blocks, each a shard; default: redis_url"
    )
    cluster: bool = Field(default=False, description="the servers are nodes of one Redis Cluster")
    maxmemory_policy: Literal["volatile-ttl", "noeviction", "any"] = Field(
        default="volatile-ttl", description="what every server with a memory limit must have; any: do not check"
    )
    retention: Literal["session", "day", "week"] = Field(
        default="day", description="how long an unused block is kept: 1, 24 or 168 hours"
    )
    mac: Literal["auto", "on", "off"] = Field(
        default="auto", description="sign values with the cluster secret; auto: unless everything is on this machine"
    )
    direct: bool | None = Field(
        default=None,
        description="decode ranks may read, in plain text, from a prefill rank's memory when the store is no help; "
        "default: on, off with tls.peer_cert_file",
    )
    direct_hold_mib: int = Field(default=256, ge=1, description="what a prefill rank holds for that, at most")
    direct_hold_seconds: float = Field(default=60.0, gt=0, description="how long it holds it, at most")
    node_cache_mib: int | None = Field(
        default=None, ge=0, description="blocks shared by the ranks of a machine; default: 128 with serve, else none"
    )
    node_cache_dir: Path = Field(default=Path("/dev/shm"), description="where they are kept: a file system in memory")
    port: Port = Field(default=8400, description="gRPC port of `whalepod kv serve`")
    tenant_quota_mib: int | None = Field(
        default=None, ge=1, description="blocks that one tenant may have on each server; default: no limit"
    )
    evictor: bool = Field(default=False, description="`whalepod kv serve` evicts leaf by leaf before the server must")

    @property
    def retention_seconds(self) -> float:
        return RETENTION_HOURS[self.retention] * 3600.0


class EplbSettings(Section):
    """Balancing of experts over the ranks of an expert-parallel pool, and what is done about ranks that hang."""

    window_steps: int = Field(default=1000, ge=1, description="steps whose routing counts")
    interval_steps: int = Field(default=3000, ge=0, description="steps between two looks at the loads; 0: never move")
    gain_min: float = Field(default=0.02, ge=0, le=1, description="balancedness that a layer must gain to be moved")
    nodes: int = Field(
        default=1, ge=1, description="machines under the ranks of a pool; above 1, an expert's replicas share one"
    )
    step_timeout_seconds: float = Field(
        default=120.0, gt=0, description="a rank that computes longer at one step prints its stacks and ends"
    )


class RaySettings(Section):
    """Ray starts and restarts ranks. It is not on the way of any request."""

    address: str | None = Field(
        default=None, description="a running Ray to join, host:port; default: a local one of our own"
    )
    dashboard: bool = Field(default=False, description="serve Ray's dashboard on port 8265")
    one_node: bool = Field(
        default=False, description="all ranks of a pool on one machine, or none: they exchange rows at every layer"
    )
    pool_resources: bool = Field(
        default=False, description="place a rank only where Ray has `whalepod_prefill`, `_decode` or `_vision` for it"
    )


class ClusterConfig(Section):
    """Everything a cluster is told. See `load_config` for where it comes from."""

    model: str | None = Field(default=None, description="checkpoint directory; default: the small model that ships")
    served_model_name: str | None = Field(default=None, description="name in the API; default: the directory's")
    secret: SecretStr | None = Field(default=None, description="cluster secret, at least 16 bytes; prefer secret_file")
    secret_file: Path | None = Field(
        default=None, description="file that holds the cluster secret; further lines: others that are believed"
    )
    host: str = Field(default="127.0.0.1", description="address that servers listen on")
    advertise_host: str | None = Field(
        default=None, description="address that others reach this machine at; default: host"
    )
    ranks_apart: bool = Field(
        default=False,
        description="each rank has an address of its own, as pods have: all of a pool listen on the pool's port",
    )
    rank_host: str | None = Field(
        default=None,
        description="ranks_apart: host of a rank, {pool} and {index} standing for its own; needed by expert_parallel",
    )
    redis_url: str | None = Field(default=None, description="the store and registry; default: an embedded Redis")
    redis_port: Port = Field(default=6380, description="port of the embedded Redis")
    redis_memory_mib: int = Field(default=512, ge=16, description="what the embedded Redis may hold")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe events to log"
    )
    log_json: bool = Field(default=False, description="one JSON object for each logged event")
    fault_injection: bool = Field(
        default=False, description="FOR STAGING ONLY: processes take orders of `whalepod fault`"
    )
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    vision: VisionSettings = VisionSettings()
    engine: EngineSettings = EngineSettings()
    dspark: DsparkSettings = DsparkSettings()
    fidelity: FidelitySettings = FidelitySettings()
    router: RouterSettings = RouterSettings()
    tls: TlsSettings = TlsSettings()
    tracing: TracingSettings = TracingSettings()
    kv: KvSettings = KvSettings()
    eplb: EplbSettings = EplbSettings()
    ray: RaySettings = RaySettings()

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        for contradiction in (*contradictions(self), *port_clashes(self)):
            raise ValueError(contradiction)
        return self

    @property
    def model_dir(self) -> Path:
        """The checkpoint. Raises ConfigError if none is set: only `whalepod serve` has a default."""
        if self.model is None:
            raise ConfigError("no model: set model (--model, WHALEPOD_MODEL) to a checkpoint directory")
        return Path(self.model)

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model_dir.resolve().name

    def prefill_role(self, index: int) -> RankRole:
        """Of prefill rank `index`. The first of each context-parallel group is its head."""
        if index % self.prefill.context_parallel:
            return RankRole.PREFILL_MEMBER
        return RankRole.PREFILL_FULL if self.prefill.role == "full" else RankRole.PREFILL_ENCODER

    def pool(self, name: str) -> PrefillSettings | DecodeSettings | VisionSettings:
        """Of one of the pools `prefill`, `decode` and `vision`."""
        return {"prefill": self.prefill, "decode": self.decode, "vision": self.vision}[name]

    @property
    def encodes_inline(self) -> bool:
        """Whether ranks that compute prompts encode their images."""
        return self.vision.replicas == 0

    @property
    def serves_direct(self) -> bool:
        """Whether prefill ranks serve values from their memory. Not in plain text unless somebody says so."""
        return self.tls.peer_cert_file is None if self.kv.direct is None else self.kv.direct

    @property
    def public_url(self) -> str:
        """Where clients on this machine reach the router."""
        scheme = "http" if self.tls.cert_file is None else "https"
        return f"{scheme}://" + join_address(self._local_host, self.router.http_port)

    @property
    def admin_ports(self) -> tuple[int, ...]:
        """Of each router process, in order; empty: operators use the public port."""
        first = self.router.admin_port
        return () if first is None else tuple(range(first, first + self.router.process_count))

    @property
    def operator_urls(self) -> tuple[str, ...]:
        """Where operators on this machine reach each router process."""
        urls = tuple("http://" + join_address(self._local_host, port) for port in self.admin_ports)
        return urls or (self.public_url,)

    @property
    def operator_url(self) -> str:
        """Of the first."""
        return self.operator_urls[0]

    @property
    def _local_host(self) -> str:
        return self.host if self.host not in ("0.0.0.0", "::") else "127.0.0.1"

    @property
    def reachable_host(self) -> str:
        """The host part of addresses that this machine's servers register."""
        return self.advertise_host or self.host

    @property
    def redis_url_or_embedded(self) -> str:
        return self.redis_url or f"redis://127.0.0.1:{self.redis_port}/0"

    @property
    def kv_urls(self) -> tuple[str, ...]:
        """Where blocks are kept."""
        return self.kv.urls or (self.redis_url_or_embedded,)

    def cluster_secret(self) -> ClusterSecret:
        """Raises ConfigError if neither `secret` nor `secret_file` gives a good one."""
        if self.secret is not None:
            text = self.secret.get_secret_value().encode()
        elif self.secret_file is not None:
            try:
                text = self.secret_file.read_bytes()
            except OSError as error:
                raise ConfigError(f"secret_file {self.secret_file} cannot be read: {error.strerror}") from None
        else:
            raise ConfigError("a process of a cluster needs its secret: set secret_file (or WHALEPOD_SECRET)")
        if not text.isascii():
            raise ConfigError("the cluster secret must be ASCII text")
        try:
            return ClusterSecret.parse(text)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def with_secret(self, secret: str) -> ClusterConfig:
        """A copy that carries the secret itself."""
        return self.model_copy(update={"secret": SecretStr(secret), "secret_file": None})

    def without_secret(self) -> ClusterConfig:
        """A copy that may be written down."""
        return self.model_copy(update={"secret": None, "secret_file": None})

    def ports(self) -> dict[str, int]:
        """Every port this cluster listens on, by the setting it comes from."""
        ports = {"http_port": self.router.http_port, "grpc_port": self.router.grpc_port}
        for index, port in enumerate(self.admin_ports):
            ports["admin_port" if index == 0 else f"admin_port + {index}"] = port
        for name, pool in (("prefill", self.prefill), ("decode", self.decode), ("vision", self.vision)):
            for index in range(min(pool.replicas, 1) if self.ranks_apart else pool.replicas):
                ports[f"{name}.port + {index}"] = pool.port + index
                ports[f"{name}.port + {index} + {METRICS_PORT_OFFSET} (metrics)"] = (
                    pool.port + index + METRICS_PORT_OFFSET
                )
                if name == "prefill" and self.serves_direct:
                    ports[f"{name}.port + {index} + {DIRECT_PORT_OFFSET} (direct)"] = (
                        pool.port + index + DIRECT_PORT_OFFSET
                    )
        if self.redis_url is None:
            ports["redis_port"] = self.redis_port
        return ports


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 literal."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
