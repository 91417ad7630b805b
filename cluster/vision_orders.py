"""What vision ranks are asked: an image, signed by a process of the cluster. And which of them is best asked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import AuthenticationError, ModelNotFoundError, UnavailableError
from whalepod.engine.images import RequestImage
from whalepod.rpc.vision.v1 import vision_pb2

from .tickets import CLOCK_SKEW_MS


@dataclass(frozen=True, slots=True)
class VisionCaller:
    """Signs orders for the ranks of one model and namespace."""

    model: str
    namespace: bytes
    secret: ClusterSecret
    clock: Clock

    def request(
        self, image: RequestImage, *, seconds: float, wants_rows: bool, traceparent: str = ""
    ) -> vision_pb2.EncodeRequest:
        """Good for so many seconds."""
        order = vision_pb2.EncodeOrder(
            model=self.model,
            namespace=self.namespace,
            width=image.width,
            height=image.height,
            data=image.data,
            expires_unix_ms=self.clock.unix_ms() + int(1000 * seconds),
            wants_rows=wants_rows,
            salt=image.salt,
            owner=image.owner,
            traceparent=traceparent,
        ).SerializeToString()
        return vision_pb2.EncodeRequest(order=order, mac=self.secret.mac(Purpose.IMAGE, order))

    def verified(self, request: vision_pb2.EncodeRequest) -> vision_pb2.EncodeOrder:
        """The order, if it is for ranks like this one. Raises AuthenticationError, ModelNotFoundError, UnavailableError
        (of another namespace)."""
        if not self.secret.verifies(Purpose.IMAGE, request.order, request.mac):
            raise AuthenticationError("the order's signature is wrong")
        try:
            order = vision_pb2.EncodeOrder.FromString(request.order)
        except DecodeError:
            raise AuthenticationError("the order cannot be parsed") from None
        if self.clock.unix_ms() > order.expires_unix_ms + CLOCK_SKEW_MS:
            raise AuthenticationError("the order has expired")
        if order.model != self.model:
            raise ModelNotFoundError(order.model, self.model)
        if order.namespace != self.namespace:
            raise UnavailableError("this rank's images would not fit the caller's weights or arithmetic")
        return order


def by_affinity(addresses: Iterable[str], content_hash: bytes) -> list[str]:
    """All of them, the one first that everybody asks first for this image: so it is encoded once, and when a rank
    leaves or joins, only its share of the images moves."""
    return sorted(addresses, key=lambda address: hashlib.sha256(content_hash + address.encode()).digest())
