"""Signatures of what ranks of a pool say to each other, and the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import AuthenticationError
from whalepod.rpc.group.v1 import group_pb2

AGE_MS_MAX = 10 * 60 * 1000
"""As of registrations: clocks of machines differ. What is repeated within it does no harm."""

Request = TypeVar(
    "Request", group_pb2.ProbeRequest, group_pb2.JoinRequest, group_pb2.WakeRequest, group_pb2.StoredRequest
)


def sign(request: Request, secret: ClusterSecret, clock: Clock) -> Request:
    """The same message, signed."""
    request.signature.time_unix_ms = clock.unix_ms()
    request.signature.mac = secret.mac(Purpose.GROUP, _signed_bytes(request))
    return request


def verify_or_raise(request: Request, secret: ClusterSecret, clock: Clock) -> None:
    """Raises AuthenticationError if the message is not signed with this cluster's secret, or long ago."""
    if not secret.verifies(Purpose.GROUP, _signed_bytes(request), request.signature.mac):
        raise AuthenticationError("a message to a group is not signed with this cluster's secret")
    if abs(clock.unix_ms() - request.signature.time_unix_ms) > AGE_MS_MAX:
        raise AuthenticationError("a message to a group is too old, or a clock is wrong")


def _signed_bytes(request: Request) -> bytes:
    bare = type(request)()
    bare.CopyFrom(request)
    bare.signature.mac = b""
    return bare.DESCRIPTOR.name.encode() + b"\0" + bare.SerializeToString(deterministic=True)


def held_to_proto(held: Mapping[str, Sequence[int]]) -> list[group_pb2.HeldExperts]:
    return [group_pb2.HeldExperts(prefix=prefix, experts=experts) for prefix, experts in held.items()]


def held_from_proto(held: Iterable[group_pb2.HeldExperts]) -> dict[str, tuple[int, ...]]:
    return {each.prefix: tuple(each.experts) for each in held}
