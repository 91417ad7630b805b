"""What a rank says of itself when it joins, and the signature that makes it believable.

    rank ── SignedRegistration ──▶ Redis ── SignedRegistration ──▶ router: verified, then checked for compatibility

Whoever can write to Redis still cannot become a rank: a registration is believed only with the cluster secret's MAC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from google.protobuf.message import DecodeError

from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import AuthenticationError
from whalepod.core.ids import Incarnation, RankId
from whalepod.engine.interface import Fidelity, RankLoad
from whalepod.rpc.common.v1 import common_pb2

from .wire import FIDELITIES, load_from_proto, load_to_proto

AGE_MS_MAX = 10 * 60 * 1000
"""A registration signed longer ago (or ahead) than this is a replay. Wide, because machines' clocks differ; whether its
rank still lives is judged by its being written again and again, on the reader's own clock."""


class RankRole(Enum):
    """What a rank does, and for prefill how much of the model it holds."""

    PREFILL_FULL = "prefill_full"
    PREFILL_ENCODER = "prefill_encoder"
    PREFILL_MEMBER = "prefill_member"
    """Computes prompts with the head of its group, which has them; routers send it none."""
    DECODE = "decode"
    VISION = "vision"

    @property
    def is_prefill(self) -> bool:
        """Whether it is sent prompts to prefill."""
        return self in (RankRole.PREFILL_FULL, RankRole.PREFILL_ENCODER)

    @property
    def pool(self) -> str:
        """As the settings name it."""
        return "prefill" if self.is_prefill or self is RankRole.PREFILL_MEMBER else self.value


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One registered rank. `address` is `host:port` of its gRPC server; `namespace` is 16 bytes and `layout` the
    readable description behind it: ranks of one cluster must agree on both."""

    rank_id: RankId
    role: RankRole
    pool: str
    address: str
    incarnation: Incarnation
    model: str
    namespace: bytes
    layout: str
    context_tokens_max: int
    fidelities: tuple[Fidelity, ...] = (Fidelity.FAST, Fidelity.EXACT)
    version: str = ""
    time_unix_ms: int = 0
    load: RankLoad = field(default_factory=RankLoad)
    draining: bool = False
    reads_batches: bool = False
    """A decode rank that takes several messages in one."""
    speaks_tls: bool = False
    """At `address`; else plain text."""

    def incompatibility(self, *, model: str, namespace: bytes, layout: str) -> str | None:
        """Why this rank cannot work beside ranks of `model`, `namespace` and `layout`; None: it can."""
        if self.model != model:
            return f"{self.rank_id} serves model {self.model!r}, this cluster serves {model!r}"
        if self.namespace != namespace:
            return (
                f"{self.rank_id} stores state as {self.layout!r} (namespace {self.namespace.hex()}), "
                f"this cluster as {layout!r} (namespace {namespace.hex()}): their blocks are not interchangeable"
            )
        return None

    def unreachable_for(self, *, speaks_tls: bool) -> str | None:
        """Why a process with these settings cannot talk to this rank; None: it can."""
        if self.speaks_tls == speaks_tls:
            return None
        rank, here = ("TLS", "plain text") if self.speaks_tls else ("plain text", "TLS")
        return (
            f"{self.rank_id} at {self.address} speaks {rank}, this process {here}: give tls.peer_cert_file, "
            "tls.peer_key_file and tls.peer_ca_file to every process of the cluster, or to none"
        )


_ROLE_TO_PROTO = {
    RankRole.PREFILL_FULL: common_pb2.ROLE_PREFILL_FULL,
    RankRole.PREFILL_ENCODER: common_pb2.ROLE_PREFILL_ENCODER,
    RankRole.PREFILL_MEMBER: common_pb2.ROLE_PREFILL_MEMBER,
    RankRole.DECODE: common_pb2.ROLE_DECODE,
    RankRole.VISION: common_pb2.ROLE_VISION,
}
_ROLE_FROM_PROTO = {number: role for role, number in _ROLE_TO_PROTO.items()}


def sign_registration(info: RankInfo, secret: ClusterSecret) -> bytes:
    """A serialised `SignedRegistration`."""
    payload = common_pb2.Registration(
        rank_id=info.rank_id,
        role=_ROLE_TO_PROTO[info.role],
        pool=info.pool,
        address=info.address,
        incarnation=info.incarnation,
        model=info.model,
        namespace=info.namespace,
        layout=info.layout,
        context_tokens_max=info.context_tokens_max,
        fidelities=[FIDELITIES[fidelity] for fidelity in info.fidelities],
        version=info.version,
        time_unix_ms=info.time_unix_ms,
        load=load_to_proto(info.load),
        draining=info.draining,
        reads_batches=info.reads_batches,
        speaks_tls=info.speaks_tls,
    ).SerializeToString()
    mac = secret.mac(Purpose.REGISTRATION, payload)
    return common_pb2.SignedRegistration(registration=payload, mac=mac).SerializeToString()


def open_registration(data: bytes, secret: ClusterSecret, *, now_unix_ms: int) -> RankInfo:
    """The registration inside `data`. Raises AuthenticationError if it is malformed, forged or a replay."""
    try:
        signed = common_pb2.SignedRegistration.FromString(data)
        message = common_pb2.Registration.FromString(signed.registration)
    except DecodeError as error:
        raise AuthenticationError(f"a registration cannot be parsed: {error}") from None
    if not secret.verifies(Purpose.REGISTRATION, signed.registration, signed.mac):
        raise AuthenticationError(f"the registration of {message.rank_id!r} is not signed with this cluster's secret")
    if abs(now_unix_ms - message.time_unix_ms) > AGE_MS_MAX:
        raise AuthenticationError(f"the registration of {message.rank_id!r} is too old or its clock is wrong")
    role = _ROLE_FROM_PROTO.get(message.role)
    if role is None:
        raise AuthenticationError(f"{message.rank_id!r} registered with unknown role {message.role}")
    return RankInfo(
        rank_id=RankId(message.rank_id),
        role=role,
        pool=message.pool,
        address=message.address,
        incarnation=Incarnation(message.incarnation),
        model=message.model,
        namespace=message.namespace,
        layout=message.layout,
        context_tokens_max=message.context_tokens_max,
        fidelities=tuple(fidelity for fidelity, number in FIDELITIES.items() if number in message.fidelities),
        version=message.version,
        time_unix_ms=message.time_unix_ms,
        load=load_from_proto(message.load),
        draining=message.draining,
        reads_batches=message.reads_batches,
        speaks_tls=message.speaks_tls,
    )
