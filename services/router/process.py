"""One router's process: the ranks' table, the store's lookup, and the two fronts over one door.

bind ports ─▶ read tokenizer ─▶ watch the registry ─▶ listen ─▶ … ─▶ stop asked
  ─▶ not ready, refuse newcomers ─▶ let requests finish ─▶ close fronts, streams, registry
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from whalepod.cluster.config import ClusterConfig, join_address
from whalepod.cluster.registry import RegistryWatcher
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import ConfigError
from whalepod.model.config import ModelConfig

from .app import HttpFront
from .grpc_front import GrpcFront
from .http_protocol import BoundedHttpProtocol
from .readiness import Readiness
from .router_parts import RouterParts, load_language, store_connector

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 1.0
"""What answers that are still being sent get when draining is over."""


async def run_router(
    config: ClusterConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Serve until `stop` is set, then drain. Returns when nothing of the router is left.

    `on_ready` is called when both fronts listen; the ranks may still be starting. Raises ConfigError or
    CheckpointError before serving.
    """
    listener = _bind_http(config)
    try:
        router = RouterProcess(config, clock=clock)
        await router.serve(listener, stop=stop, on_ready=on_ready)
    finally:
        listener.close()


class RouterProcess:
    """The parts of a running router, and the order in which they start and stop."""

    def __init__(self, config: ClusterConfig, *, clock: Clock) -> None:
        self._config = config
        self._watcher = RegistryWatcher(
            redis_url=config.redis_url_or_embedded,
            secret=config.cluster_secret(),
            on_change=lambda _: self._parts.ranks_changed(),
            clock=clock,
        )
        self._parts = RouterParts(
            config,
            ModelConfig.from_dir(config.model_dir),
            load_language(config),
            self._watcher,
            connect_store=store_connector(config, clock),
            purge_epoch=self._watcher.purge_epoch,
            clock=clock,
        )
        self._readiness = Readiness(
            self._parts.front,
            needs_prefill=config.prefill.replicas > 0 and config.router.remote_prefill != "never",
            registry_ok=lambda: self._watcher.redis_ok,
        )
        trust = config.router.trust_tenant_header
        self._grpc = GrpcFront(self._parts.front, trust_tenant_header=trust)
        self._grpc.bind(join_address(config.host, config.router.grpc_port))
        app = HttpFront(self._parts.front, self._readiness, trust_tenant_header=trust).app()
        self._http = http_server(app)

    async def serve(self, listener: socket.socket, *, stop: asyncio.Event, on_ready: Callable[[], None] | None) -> None:
        http = asyncio.create_task(self._http.serve(sockets=[listener]), name="http")
        try:
            await self._watcher.start()
            await self._grpc.start()
            await self._until_listening(http)
            host, router = self._config.host, self._config.router
            log.info(
                "router is listening",
                extra={"http": join_address(host, router.http_port), "grpc": join_address(host, router.grpc_port)},
            )
            if on_ready is not None:
                on_ready()
            await _first_of(stop, http)
            await self._drain(router.drain_seconds)
        finally:
            self._http.should_exit = True
            await asyncio.gather(http, return_exceptions=True)
            await self._grpc.stop(grace_s=CLOSE_GRACE_S)
            await self._parts.close()
            self._parts.front.language.close()
            await self._watcher.stop()

    async def _until_listening(self, http: asyncio.Task[None]) -> None:
        while not self._http.started and not http.done():
            await asyncio.sleep(0.005)

    async def _drain(self, seconds: float) -> None:
        """Leave the load balancer, take nobody new, and let what is here finish, at most so long."""
        self._readiness.draining = True
        await self._grpc.set_serving(serving=False)
        admission = self._parts.front.admission
        admission.close()
        try:
            async with asyncio.timeout(seconds):
                await admission.wait_until_idle()
        except TimeoutError:
            log.warning("draining took too long", extra={"requests": admission.running})


def http_server(app: ASGIApp) -> uvicorn.Server:
    """An HTTP server for `app`; `serve(sockets=[…])` runs it until `should_exit` is set."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it tells of every start and stop; so do we
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, int(CLOSE_GRACE_S)),
        )
    )


async def _first_of(stop: asyncio.Event, http: asyncio.Task[None]) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((stopping, http), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


def _bind_http(config: ClusterConfig) -> socket.socket:
    """Raises ConfigError if the port is taken."""
    host, port = config.host, config.router.http_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        address = join_address(host, port)
        raise ConfigError(f"the router cannot listen on {address} (router.http_port): {error.strerror}") from None
    return listener
