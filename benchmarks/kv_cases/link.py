"""A link of fixed speed before a server: relays bytes without looking at them, no faster than it is told.

    python link.py UNIX_SOCKET_OF_SERVER PORT MB_PER_S

A process of its own, so that what it costs is not counted as the client's. Only the way from the server is slowed; all
connections share it. Bytes pass through pipes inside the kernel.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

CHUNK_BYTES = 128 << 10
LATE_S = 0.002
"""A sender that was held up may catch up this much."""


class Pace:
    """So many bytes a second, for all who ask together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = time.perf_counter()

    def wait(self, sent_bytes: int) -> None:
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.perf_counter() - LATE_S) + sent_bytes / self._bytes_per_s
            free_at_s = self._free_at_s
        while (pause_s := free_at_s - time.perf_counter()) > 0:
            time.sleep(pause_s)


def main() -> None:
    path, port, megabytes_per_s = sys.argv[1:]
    pace = Pace(float(megabytes_per_s) * 1e6)
    with socket.create_server(("127.0.0.1", int(port))) as listener:
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.socket(socket.AF_UNIX)
            server.connect(path)
            for ends in ((client, server, None), (server, client, pace)):
                threading.Thread(target=_relay, args=ends, daemon=True).start()


def _relay(source: socket.socket, target: socket.socket, pace: Pace | None) -> None:
    out, into = os.pipe()
    while moved := os.splice(source.fileno(), into, CHUNK_BYTES):
        if pace is not None:
            pace.wait(moved)
        while moved:
            moved -= os.splice(out, target.fileno(), moved)
    target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
