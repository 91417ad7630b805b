"""The router's gRPC port, as tools beside it reach it: the canary, `whalepod fault … router`.

Where it speaks TLS to clients (`tls.cert_file`), they believe that very certificate, whoever has signed it and whatever
names are in it: they have the file.
"""

from __future__ import annotations

import ssl
from typing import Any

import grpc

from whalepod.core.errors import ConfigError

from .config import ClusterConfig, join_address
from .grpc_options import channel_options
from .peer_tls import PeerTls
from .tls import ServerTls, shake_hands

END = b"-----END CERTIFICATE-----"


def open_router_channel(config: ClusterConfig) -> grpc.aio.Channel:
    """Where clients must show a certificate (`tls.client_ca_file`), it shows what processes of the cluster show each
    other, or else the router's own. Raises ConfigError if the files cannot be used."""
    address, tls = join_address(config.reachable_host, config.router.grpc_port), config.tls
    if tls.cert_file is None or tls.key_file is None:
        return grpc.aio.insecure_channel(address, options=channel_options())
    server = ServerTls(cert_file=tls.cert_file, key_file=tls.key_file)
    key, chain, _ = server.pems()
    own = chain[: chain.index(END) + len(END)] + b"\n"
    name = _name_in(server, own)
    if tls.client_ca_file is None:
        credentials = grpc.ssl_channel_credentials(own)
    else:
        peer = PeerTls.of(tls)
        key, chain = (key, chain) if peer is None else peer.pair
        credentials = grpc.ssl_channel_credentials(own, key, chain)
    options = [*channel_options(), ("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(address, credentials, options=options)


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What a call shows where clients must have a key (`router.api_keys_file`)."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _name_in(server: ServerTls, own: bytes) -> str:
    """One of the names in its certificate."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=own.decode("ascii", "ignore"))
    try:
        shown: Any = shake_hands(client, server.context(), name=None).getpeercert()
    except ssl.SSLError as error:
        raise ConfigError(f"tls.cert_file cannot be used: {error.args[-1]}") from None
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += [value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"]
    if not names:
        raise ConfigError("tls.cert_file has no name in it")
    return names[0].replace("*", "router", 1)
