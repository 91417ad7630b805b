"""Many hand-offs that arrive at once over a link of fixed speed: how long each is waited for, and what it costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from whalepod.core.block_keys import RUN_BLOCKS
from whalepod.core.clock import Deadline
from whalepod.core.ids import Incarnation, RequestId
from whalepod.kvstore.client import BlockToPut, KvClient
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.store_keys import handoff_snapshot_key
from whalepod.kvstore.value_format import BlockLayout, FormatId, PartKind, SnapshotValue

from .contenders import BLOCK_TOKENS, NAMESPACE, Work
from .server import BenchmarkServer

IMPORTS = 64
SNAPSHOT_BYTES = 2_900_000
"""Windows of the released model."""
CALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Imports:
    """`exposed_ms`: from a hand-off's READY to its last byte in place."""

    exposed_ms_p50: float
    exposed_ms_max: float
    share_of_link: float
    """1 is all that the link can do."""
    cpu_s_per_gb: float
    gigabytes: float


def measure_imports(server: BenchmarkServer, work: Work, *, port: int, megabytes_per_s: float) -> Imports:
    """Each import is a run of blocks and a snapshot, all its own, with the payloads of `work`.

    Raises RuntimeError if the link does not start.
    """
    layout = BlockLayout.from_layers(
        block_tokens=BLOCK_TOKENS, format_id=FormatId.RELEASE, global_kv={0: work.payload_bytes}, index_keys={}
    )
    keys = [handoff_snapshot_key(RequestId(number.to_bytes(16, "little")), 1) for number in range(IMPORTS)]
    snapshot = SnapshotValue(boundary_tokens=1, mode=1, parts={PartKind.WINDOW_ROWS: bytes(SNAPSHOT_BYTES)})
    publisher = _client(server.unix, layout)
    payloads = work.payloads[:RUN_BLOCKS]
    prompts = [Work.of(RUN_BLOCKS, payloads, salt=key) for key in keys]
    for key, prompt in zip(keys, prompts, strict=True):
        blocks = [BlockToPut(name, data, True) for name, data in zip(prompt.keys, payloads, strict=True)]
        assert publisher.put_blocks(blocks, deadline=Deadline.after(CALL_S)) == len(blocks)
        assert publisher.put_snapshot(key, snapshot, ttl_s=600, deadline=Deadline.after(CALL_S))
    publisher.close()
    command = [
        sys.executable,
        str(Path(__file__).with_name("link.py")),
        server.unix.path,
        str(port),
        str(megabytes_per_s),
    ]
    link = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if link.stdout is None or link.stdout.readline() != "ready\n":
            raise RuntimeError("the link did not start")
        client = _client(StoreAddress(host="127.0.0.1", port=port), layout)
        client.lookup(work.keys[:1], deadline=Deadline.after(CALL_S))  # connected
        figures = _import_all(client, prompts, keys, megabytes_per_s=megabytes_per_s)
        client.close()
        return figures
    finally:
        link.kill()
        link.wait()


def _client(address: StoreAddress, layout: BlockLayout) -> KvClient:
    settings = StoreSettings(addresses=(address,), data_timeout_s=CALL_S)
    return KvClient(settings, namespace=NAMESPACE, layout=layout, incarnation=Incarnation(1))


def _import_all(client: KvClient, prompts: list[Work], keys: list[bytes], *, megabytes_per_s: float) -> Imports:
    buffers = [[memoryview(bytearray(prompt.payload_bytes)) for _ in prompt.keys] for prompt in prompts]
    waited_s: list[float] = []
    ready = threading.Barrier(len(keys) + 1)

    def restore(prompt: Work, key: bytes, into: list[memoryview]) -> None:
        ready.wait()
        start_s, deadline = time.perf_counter(), Deadline.after(CALL_S)
        assert client.fetch_blocks(prompt.keys, into, deadline=deadline).count == len(into)
        assert client.get_snapshot(key, deadline=deadline) is not None
        waited_s.append(time.perf_counter() - start_s)

    threads = [threading.Thread(target=restore, args=each) for each in zip(prompts, keys, buffers, strict=True)]
    for thread in threads:
        thread.start()
    ready.wait()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    assert len(waited_s) == len(keys), "an import failed"
    gigabytes = len(keys) * (SNAPSHOT_BYTES + RUN_BLOCKS * prompts[0].payload_bytes) / 1e9
    waited_ms = sorted(1000 * seconds for seconds in waited_s)
    return Imports(
        exposed_ms_p50=statistics.median(waited_ms),
        exposed_ms_max=waited_ms[-1],
        share_of_link=gigabytes * 1000 / megabytes_per_s / wall_s,
        cpu_s_per_gb=cpu_s / gigabytes,
        gigabytes=gigabytes,
    )
