"""What a router is made of, apart from its fronts and from where it learns of ranks.

settings ─▶ RouterParts ─▶ FrontDoor ─▶ Dispatcher ─▶ DecodeStreams, PrefillClient
                               └─▶ Language, Admission, PrefixLookup      RankTable ◀─ directory of ranks
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.peer_tls import Dialler
from whalepod.cluster.store_connection import store_settings
from whalepod.core.block_keys import chain_root
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.ids import mint_incarnation
from whalepod.kvstore.client import KvClient
from whalepod.model.config import ModelConfig
from whalepod.model.tokenizer import Tokenizer

from .admission import Admission
from .cost_meter import CostMeter
from .decode_stream import DecodeStreams
from .dispatch import Dispatcher, DispatchOptions
from .front_door import FrontDoor, ServedModel
from .hot_ranks import HotRanks
from .job import Job
from .joint_memory import JointMemory
from .joint_parts import JointParts
from .language import Language
from .placement import PlacementRules, Policy, RemotePrefill
from .placer import Patience, Placer
from .prefill_client import PrefillClient, link_key
from .prefix_lookup import PrefixLookup
from .rank_table import RankDirectory, RankTable
from .shared_prefixes import SharedPrefixes
from .tenant_limits import Limits, TenantLimits
from .vision_ahead import VisionAhead


class RouterParts:
    """Everything of a router but its fronts and its directory of ranks."""

    def __init__(
        self,
        config: ClusterConfig,
        model_config: ModelConfig,
        language: Language,
        directory: RankDirectory,
        *,
        connect_store: Callable[[bytes], KvClient] | None,
        purge_epoch: Callable[[str], int] = lambda _: 0,
        tls: Dialler | None = None,
        meter: CostMeter | None = None,
        memory: JointMemory | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`tls`: what ranks are shown; None: plain text. `meter`: knows what prompts cost; None: one that learns it.
        `memory`: what this process shares with the others of its router; None: it is alone."""
        router = config.router
        joint = _joint_parts(config, memory)
        secret = config.cluster_secret()
        meter = meter or CostMeter()
        self._table = RankTable(directory, meter=meter, drains=joint and joint.drains, clock=clock)
        on_load, on_lost, on_draining = self._table.note_load, self._table.report_lost, self._table.note_draining
        self._streams = DecodeStreams(on_load=on_load, on_lost=on_lost, on_draining=on_draining, tls=tls, clock=clock)
        self._prefills = PrefillClient(on_load=on_load, on_lost=on_lost, on_draining=on_draining, tls=tls)
        self._vision = VisionAhead(secret=secret, on_lost=on_lost, tls=tls, clock=clock)
        self._lookup = PrefixLookup(connect_store, clock=clock)
        block_tokens = config.engine.block_tokens or model_config.block_tokens
        shared = SharedPrefixes(
            block_tokens=block_tokens,
            tokens_min=max(block_tokens, router.remote_prefill_tokens_min),
            meter=meter,
            stored_blocks=self._stored_blocks,
            joint=joint and joint.prefixes,
            clock=clock,
        )
        placer = Placer(
            self._table,
            shared,
            usable=self._streams.usable,
            rules=_placement_rules(config),
            patience=Patience(lost_s=min(Patience().lost_s, router.queue_timeout_seconds)),
            retry_max=router.retry_max,
            meter=meter,
            rng=Random(mint_incarnation()),
            hot=HotRanks(joint and joint.places),
            clock=clock,
        )
        dispatcher = Dispatcher(
            self._table,
            self._streams,
            self._prefills,
            placer,
            self._vision,
            model=model_config,
            options=DispatchOptions(retry_max=router.retry_max, room_wait_s=router.queue_timeout_seconds),
            secret=secret,
            clock=clock,
        )
        self._admission = _admission(config, self._table, joint, clock)
        self.front = FrontDoor(
            _served_model(config, model_config),
            language=language,
            table=self._table,
            dispatcher=dispatcher,
            admission=self._admission,
            lookup=self._lookup,
            secret=secret,
            purge_epoch=purge_epoch,
            clock=clock,
        )

    def ranks_changed(self) -> None:
        """The directory's ranks are others now: whoever waits for one looks again, links to the lost are closed."""
        self._table.wake()
        self._admission.room_changed()
        self._streams.give_up_gone(self._table.ranks)
        keep = {link_key(rank) for rank in self._table.ranks.values()}
        for links in (self._prefills, self._vision):
            links.close_links(keep=keep)

    async def _stored_blocks(self, job: Job) -> int:
        namespace = next((rank.namespace for rank in self._table.ranks.values()), None)
        if namespace is None:
            return 0
        root = chain_root(namespace, salt=job.salt)
        return await self._lookup.stored_blocks(job.block_hashes, root=root, namespace=namespace)

    async def close(self) -> None:
        await self._streams.close()
        await self._prefills.close()
        await self._vision.close()
        await asyncio.to_thread(self._lookup.close)


def load_language(config: ClusterConfig) -> Language:
    """Raises CheckpointError or ConfigError on a model directory that cannot be served."""
    tokenizer = Tokenizer.from_dir(config.model_dir)
    return Language(
        tokenizer,
        ModelConfig.from_dir(config.model_dir),
        served_name=config.model_name,
        image_hosts=config.router.image_hosts,
    )


def _joint_parts(config: ClusterConfig, memory: JointMemory | None) -> JointParts | None:
    router = config.router
    if memory is None:
        return None
    return JointParts(memory, running_max=router.max_concurrent_requests, queue_max=router.queue_size)


def _admission(config: ClusterConfig, table: RankTable, joint: JointParts | None, clock: Clock) -> Admission:
    router = config.router
    return Admission(
        running_max=router.max_concurrent_requests,
        queue_max=router.queue_size,
        queue_timeout_s=router.queue_timeout_seconds,
        room=table.room,
        limits=TenantLimits(
            Limits(
                requests_per_minute=router.tenant_requests_per_minute,
                tokens_per_minute=router.tenant_tokens_per_minute,
                concurrent_max=router.tenant_concurrent_requests,
            ),
            tenants=joint and joint.tenants,
            clock=clock,
        ),
        bound=joint and joint.bound,
        clock=clock,
    )


def _placement_rules(config: ClusterConfig) -> PlacementRules:
    router = config.router
    return PlacementRules(
        policy=Policy(router.policy),
        remote_prefill=RemotePrefill(router.remote_prefill),
        remote_prefill_tokens_min=router.remote_prefill_tokens_min,
    )


def _served_model(config: ClusterConfig, model: ModelConfig) -> ServedModel:
    limit = config.engine.context_tokens_max
    longest = model.max_position_embeddings
    return ServedModel(
        name=config.model_name,
        context_tokens_max=longest if limit is None else min(limit, longest),
        block_tokens=config.engine.block_tokens or model.block_tokens,
        fidelity_default=config.fidelity.default,
        fidelities=config.fidelity.allowed,
        request_timeout_s=config.router.request_timeout_seconds,
    )


def store_connector(config: ClusterConfig, clock: Clock) -> Callable[[bytes], KvClient]:
    settings = store_settings(config, secret=None)
    incarnation = mint_incarnation()
    return lambda namespace: KvClient(settings, namespace=namespace, incarnation=incarnation, clock=clock)
