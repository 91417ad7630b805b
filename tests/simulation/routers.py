"""Simulated routers: everything from the gRPC servicer down, over ranks that are found by address."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from deepseek_recipe import SpecialToken

from tests.engine.engine_world import CHECKPOINT
from tests.simulation.calls import Dialler
from tests.simulation.network import Network, Node
from tests.simulation.plans import REQUEST_TIMEOUT_S
from tests.simulation.ranks import MODEL_NAME, SharedStore
from tests.simulation.virtual_time import SimulatedClock
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.static_ranks import StaticRanks
from whalepod.core.credentials import ClusterSecret
from whalepod.core.ids import mint_incarnation
from whalepod.model.config import ModelConfig
from whalepod.model.special_tokens import recipe_special_tokens
from whalepod.model.tiny_checkpoint import shipped_tokenizer
from whalepod.rpc.router.v1 import router_pb2_grpc
from whalepod.services.router.app import HttpFront
from whalepod.services.router.authentication import Authenticator
from whalepod.services.router.front_door import FrontDoor
from whalepod.services.router.grpc_front import RouterServicer
from whalepod.services.router.http_protocol import BoundedHttpProtocol
from whalepod.services.router.http_server import http_server
from whalepod.services.router.language import Language
from whalepod.services.router.readiness import Readiness
from whalepod.services.router.router_parts import RouterParts

SECRET = "the secret of a simulated cluster"


@cache
def cluster_config(queue_timeout_s: float = 10.0) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": str(CHECKPOINT),
            "served_model_name": MODEL_NAME,
            "secret": SECRET,
            "engine": {"block_tokens": 16},
            "router": {
                "queue_timeout_seconds": queue_timeout_s,
                "request_timeout_seconds": REQUEST_TIMEOUT_S,
                "remote_prefill_tokens_min": 24,
            },
        }
    )


def cluster_secret() -> ClusterSecret:
    return cluster_config().cluster_secret()


@cache
def _language() -> Language:
    """Once for all runs: reading the tokenizer takes longer than most of them. It only has to name ids, and is not the
    one of the ranks' model, which has no words for conversations."""
    tokenizer = shipped_tokenizer()
    image_id = tokenizer.token_id(recipe_special_tokens().token(SpecialToken.Image))
    config = replace(ModelConfig.from_dir(CHECKPOINT), image_token_id=image_id)
    return Language(tokenizer, config, served_name=MODEL_NAME)


class SimulatedRouter:
    """One process of a router."""

    def __init__(
        self, index: int, ranks: Sequence[str], *, network: Network, store: SharedStore, clock: SimulatedClock
    ) -> None:
        self.index = index
        self.started = False
        self.node = Node(router_address(index))
        self._network = network
        dialler = Dialler(network, self.node)
        self._ranks = StaticRanks(
            ranks,
            secret=cluster_secret(),
            on_change=lambda _: self._parts.ranks_changed(),
            tls=dialler,
            clock=clock,
        )
        self._parts = RouterParts(
            cluster_config(),
            ModelConfig.from_dir(CHECKPOINT),
            _language(),
            self._ranks,
            connect_store=lambda _: store.client(clock, mint_incarnation())[0],
            tls=dialler,
            clock=clock,
        )
        authenticator = Authenticator(trust_tenant_header=True, clock=clock)
        servicer = RouterServicer(self.front, authenticator=authenticator)
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, self.node)  # type: ignore[arg-type]
        readiness = Readiness(self.front, needs_prefill=True, registry_ok=lambda: True)
        self._http = http_server(HttpFront(self.front, readiness, authenticator=authenticator).app())
        self._http.config.load()
        self.node.accept = self._accept

    @property
    def front(self) -> FrontDoor:
        return self._parts.front

    def _accept(self) -> asyncio.Protocol:
        """A connection to its HTTP server."""
        return BoundedHttpProtocol(
            config=self._http.config,
            server_state=self._http.server_state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )

    async def start(self) -> None:
        await self._ranks.start()
        self._network.add(self.node)
        self.started = True

    async def kill(self) -> None:
        """As `kill -9`: what is closed here has no way out any more."""
        self._network.kill(self.node, with_host=False)
        await self._ranks.stop()
        await self._parts.close()


def router_address(index: int) -> str:
    return f"router-{index}:8001"
