"""The HTTP server of a router: a socket of ours, and on it uvicorn with our bounds and our certificates."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from whalepod.cluster.config import join_address
from whalepod.cluster.tls import ServerTls
from whalepod.core.errors import ConfigError

from .http_protocol import BoundedHttpProtocol

CLOSE_GRACE_S = 1.0
"""What answers that are still being sent get when draining is over."""


def http_server(app: ASGIApp, *, tls: ServerTls | None = None) -> uvicorn.Server:
    """An HTTP server for `app`; `serve(sockets=[…])` runs it until `should_exit` is set."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it tells of every start and stop; so do we

    def context(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        del config, default
        assert tls is not None
        return tls.context()

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nothing here asks where a client is
            server_header=False,
            timeout_graceful_shutdown=max(1, int(CLOSE_GRACE_S)),
            ssl_context_factory=None if tls is None else context,
        )
    )


def bind_http(host: str, port: int, *, setting: str, shared: bool = False) -> socket.socket:
    """Raises ConfigError, naming the setting, if the port is taken. `shared`: with other processes, among which the
    system divides connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the router cannot listen on {join_address(host, port)} ({setting}): {error.strerror}"
        ) from None
    return listener
