"""A real redis-server with the configuration of the chart."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.conftest import free_port
from whalepod.core.clock import Deadline
from whalepod.core.errors import ConfigError
from whalepod.kvstore.server_check import check_servers, server_info
from whalepod.kvstore.settings import StoreAddress, StoreSettings

PASSWORD = "hush"


def accepted_by_the_store_check(lines: Mapping[str, str], binary: Path, directory: Path) -> bool:
    """Whether a rank would start with such a server. Raises AssertionError if the server itself does not start."""
    port = free_port()
    own = {**lines, "port": str(port), "dir": str(directory), "bind": "127.0.0.1", "maxmemory": "64mb"}
    conf = directory / "redis.conf"
    conf.write_text("".join(f"{key} {value}\n" for key, value in own.items()), encoding="utf-8")
    server = subprocess.Popen([binary, conf, "--requirepass", PASSWORD], stdout=subprocess.PIPE, text=True)
    try:
        address = StoreAddress(host="127.0.0.1", port=port, password=PASSWORD)
        deadline = Deadline.after(10)
        while server_info(address, deadline=Deadline.after(0.2)) is None:
            assert server.poll() is None, server.stdout.read() if server.stdout else ""
            assert not deadline.expired
        try:
            check_servers(StoreSettings(addresses=(address,)), policy="volatile-ttl")
        except ConfigError:
            return False
        return True
    finally:
        server.kill()
        server.wait()
