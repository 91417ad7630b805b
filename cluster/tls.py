"""Certificates of servers, read again when their files change: new connections get the new ones, nothing restarts.

tls.cert_file, tls.key_file         whom clients talk to
tls.client_ca_file                  whose certificates clients must show (mutual TLS); unset: none

Those between processes of the cluster are in `peer_tls.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from whalepod.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """The files as they were at one moment, and could be used."""

    version: object
    context: ssl.SSLContext
    pems: tuple[bytes, bytes, bytes | None]
    """Key, certificate chain and authorities."""


class ServerTls:
    """The files of one server. Safe to use from several threads: what is replaced is replaced whole."""

    def __init__(
        self,
        *,
        cert_file: Path,
        key_file: Path,
        client_ca_file: Path | None = None,
        settings: tuple[str, str, str] = ("tls.cert_file", "tls.key_file", "tls.client_ca_file"),
    ) -> None:
        """Raises ConfigError, naming one of the `settings`, on files that cannot be read or do not belong together."""
        self._settings = settings
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._good = self._read()

    @property
    def asks_for_certificates(self) -> bool:
        return self._client_ca_file is not None

    def context(self) -> ssl.SSLContext:
        """For a listening socket. Every handshake uses the files as they are then, or as they last were good."""
        context = self._read_context()

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            del name
            connection.context = self._now().context

        context.sni_callback = choose  # called in every handshake, with or without a name
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for a gRPC server."""
        told = [self._now()]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            now = self._now()
            if told[0] is now:
                return None
            told[0] = now
            return _grpc_configuration(now)

        # The library's stub forgets that nothing new is told by None.
        fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(told[0]), fetcher, require_client_authentication=self.asks_for_certificates
        )

    def version(self) -> object:
        """Another one when files have changed and can be used."""
        return self._now().version

    def pems(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate chain and authorities, PEM, as they are now or last were good."""
        return self._now().pems

    def _now(self) -> _Read:
        if self._current_version() != self._good.version:
            try:
                self._good = self._read()
            except ConfigError as error:
                log.error("the certificates stay as they were: %s", error)
            else:
                log.info("certificates read again")
        return self._good

    def _read(self) -> _Read:
        """Raises ConfigError, also if files are being replaced meanwhile: they may not belong together."""
        version = self._current_version()
        context = self._read_context()
        try:
            authorities = None if self._client_ca_file is None else self._client_ca_file.read_bytes()
            pems = self._key_file.read_bytes(), self._cert_file.read_bytes(), authorities
        except OSError as error:
            raise ConfigError(f"{' and '.join(self._settings[:2])} cannot be read: {error}") from None
        if self._current_version() != version:
            raise ConfigError(f"{self._settings[0]} {self._cert_file} changed while it was being read")
        return _Read(version, context, pems)

    def _read_context(self) -> ssl.SSLContext:
        cert_setting, key_setting, authorities_setting = self._settings

        def no_passphrase() -> str:
            raise ConfigError(f"{key_setting} {self._key_file} is encrypted: nobody is there to give its passphrase")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert_file, self._key_file, no_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{cert_setting} {self._cert_file} and {key_setting} {self._key_file} cannot be used: {error}"
            ) from None
        if self._client_ca_file is not None:
            try:
                context.load_verify_locations(self._client_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{authorities_setting} {self._client_ca_file} cannot be used: {error}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _current_version(self) -> object:
        files = (self._cert_file, self._key_file, self._client_ca_file)
        return tuple(None if file is None else _stat_of(file) for file in files)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, *, name: str | None) -> ssl.SSLObject:
    """In memory, to see what the two would make of each other. The client's side. Raises ssl.SSLError."""
    into_server, into_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(into_client, into_server, server_hostname=name),
        server.wrap_bio(into_server, into_client, server_side=True),
    )
    for _ in range(3):  # flights of a handshake, and one for what is left
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[0]


def _grpc_configuration(read: _Read) -> grpc.ServerCertificateConfiguration:
    key, chain, authorities = read.pems
    return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


def _stat_of(file: Path) -> object:
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
