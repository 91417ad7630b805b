"""What the processes of a cluster show each other, and whom they believe: mutual TLS, with one set of files for all.

tls.peer_cert_file, tls.peer_key_file     shown to whoever connects, and to whomever this process connects to
tls.peer_ca_file                          who must have signed what the other side shows
tls.peer_name                             the name in it; unset: the host that was dialled

With it no process of the cluster speaks plain text to another, and none that does is believed.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Protocol

import grpc

from whalepod.core.errors import ConfigError

from .config import TlsSettings
from .grpc_options import channel_options
from .tls import ServerTls, shake_hands

SETTINGS = ("tls.peer_cert_file", "tls.peer_key_file", "tls.peer_ca_file")


class Dialler(Protocol):
    """Opens channels to other processes: with TLS, or over the network of a simulation."""

    @property
    def version(self) -> object:
        """Another one: a channel that was opened before is to be replaced."""
        ...

    def channel(self, address: str) -> grpc.aio.Channel: ...


class PeerTls:
    """Safe to use from several threads. Files that change are read again; new connections use the new ones."""

    def __init__(self, *, cert_file: Path, key_file: Path, ca_file: Path, name: str | None = None) -> None:
        """Raises ConfigError, naming the setting, on files that cannot be used, or that no peer would believe."""
        self._files = (cert_file, key_file, ca_file)
        self._name = name
        self._server = ServerTls(cert_file=cert_file, key_file=key_file, client_ca_file=ca_file, settings=SETTINGS)
        self._shakes_hands_or_raise()

    @classmethod
    def of(cls, settings: TlsSettings) -> PeerTls | None:
        """None: processes speak plain text. Raises ConfigError."""
        cert, key, ca = settings.peer_cert_file, settings.peer_key_file, settings.peer_ca_file
        if cert is None or key is None or ca is None:
            return None
        return cls(cert_file=cert, key_file=key, ca_file=ca, name=settings.peer_name)

    @property
    def version(self) -> object:
        """Another one: the files have changed, and a channel that was opened before shows the old ones."""
        return self._server.version()

    @property
    def pair(self) -> tuple[bytes, bytes]:
        """Key and certificate chain, PEM."""
        key, chain, _ = self._server.pems()
        return key, chain

    def server_credentials(self) -> grpc.ServerCredentials:
        return self._server.grpc_credentials()

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to another process, `host:port`."""
        return grpc.aio.secure_channel(address, self._channel_credentials(), options=self._channel_options())

    def blocking_channel(self, address: str) -> grpc.Channel:
        return grpc.secure_channel(address, self._channel_credentials(), options=self._channel_options())

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        key, chain, authorities = self._server.pems()
        return grpc.ssl_channel_credentials(authorities, key, chain)

    def _channel_options(self) -> list[tuple[str, int] | tuple[str, str]]:
        named = [] if self._name is None else [("grpc.ssl_target_name_override", self._name)]
        return [*channel_options(), *named]

    def _shakes_hands_or_raise(self) -> None:
        """A process that nobody of its cluster would believe says so when it starts, not when it is called."""
        cert_file, key_file, ca_file = self._files
        client = ssl.create_default_context(cafile=str(ca_file))
        client.load_cert_chain(cert_file, key_file)
        client.check_hostname = self._name is not None
        try:
            shake_hands(client, self._server.context(), name=self._name)
        except ssl.SSLError as error:
            named = "" if self._name is None else f" under the name {self._name} (tls.peer_name)"
            raise ConfigError(
                f"tls.peer_cert_file {cert_file} would not be believed by who has tls.peer_ca_file {ca_file}"
                f"{named}: {error.args[-1]}"
            ) from None


def open_channel(address: str, tls: Dialler | None) -> grpc.aio.Channel:
    """To another process of the cluster, `host:port`. `tls` None: plain text."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=channel_options())
    return tls.channel(address)
