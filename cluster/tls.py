"""Certificates of servers, read again when their files change: new connections get the new ones, nothing restarts.

tls.cert_file, tls.key_file         whom clients talk to
tls.client_ca_file                  whose certificates clients must show (mutual TLS); unset: none

Those between processes of the cluster are in `peer_tls.py`.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc

from whalepod.core.errors import ConfigError

log = logging.getLogger(__name__)


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
        self._version = self._current_version()
        self._context = self._read_context()

    @property
    def asks_for_certificates(self) -> bool:
        return self._client_ca_file is not None

    def context(self) -> ssl.SSLContext:
        """For a listening socket. Every handshake uses the files as they are then, or as they last were good."""
        context = self._read_context()

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            del name
            self._look_again()
            connection.context = self._context

        context.sni_callback = choose  # called in every handshake, with or without a name
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for a gRPC server."""
        told = [self._version]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            self._look_again()
            if told[0] == self._version:
                return None
            told[0] = self._version
            return self._grpc_configuration()

        # The library's stub forgets that nothing new is told by None.
        fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(), fetcher, require_client_authentication=self.asks_for_certificates
        )

    def version(self) -> object:
        """Another one when files have changed and can be used."""
        self._look_again()
        return self._version

    def pems(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate chain and authorities, PEM."""
        authorities = None if self._client_ca_file is None else self._client_ca_file.read_bytes()
        return self._key_file.read_bytes(), self._cert_file.read_bytes(), authorities

    def _look_again(self) -> None:
        version = self._current_version()
        if version == self._version:
            return
        try:
            self._context = self._read_context()
        except ConfigError as error:
            log.error("the certificates stay as they were: %s", error)
            return
        self._version = version
        log.info("certificates read again")

    def _read_context(self) -> ssl.SSLContext:
        cert_setting, key_setting, authorities_setting = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert_file, self._key_file)
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

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        key, chain, authorities = self.pems()
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def _current_version(self) -> object:
        files = (self._cert_file, self._key_file, self._client_ca_file)
        return tuple(None if file is None else _stat_of(file) for file in files)


def _stat_of(file: Path) -> object:
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
