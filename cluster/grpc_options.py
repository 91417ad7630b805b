"""Settings of every gRPC server and channel inside the cluster.

A prompt of 1,048,576 tokens is 4 MiB of ids and, at 16 tokens a block, 2 MiB of hashes; as JSON text it is several
times that. A prefill may be silent for ten minutes: pings, not deadlines, tell a slow peer from a dead one.
"""

from __future__ import annotations

from collections.abc import Sequence

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
RECONNECT_BACKOFF_MS = (50, 1_000)
CONNECT_TIMEOUT_MS = 3_000

Option = tuple[str, int]

_MESSAGE_LIMITS: tuple[Option, ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
_KEEPALIVE: tuple[Option, ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: as many as it takes
)


def server_options(*, shares_port: bool = False) -> Sequence[Option]:
    """A port in use is an error and not a silent second listener (`so_reuseport`), unless processes share it."""
    return (
        *_MESSAGE_LIMITS,
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),  # 0: a silent stream that is kept alive is never broken off
        ("grpc.so_reuseport", int(shares_port)),
    )


def channel_options() -> Sequence[Option]:
    """Calls inside the cluster ignore `HTTP_PROXY` and come back quickly to a peer that restarted.

    Each channel has connections of its own: one that has given up on an address for a while does not hold back another.
    """
    initial_ms, max_ms = RECONNECT_BACKOFF_MS
    return (
        *_MESSAGE_LIMITS,
        *_KEEPALIVE,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", initial_ms),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # gRPC's name for how long one attempt may take
        ("grpc.max_reconnect_backoff_ms", max_ms),
    )
