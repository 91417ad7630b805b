"""One cluster per HTTP port, and others are told who serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from whalepod.cluster.serve_lock import AlreadyServingError, ServeLock, serving_record

HOLDER = """
import sys
from pathlib import Path
from whalepod.cluster.serve_lock import ServeLock
lock = ServeLock(Path(sys.argv[1]), 8000)
lock.acquire()
lock.publish(http_url="http://127.0.0.1:8000", config_file=Path("c.yaml"))
print("held", flush=True)
sys.stdin.read()
"""


def start_holder(state_dir: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_cluster_is_told_who_serves_and_gets_the_port_when_that_one_was_killed(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    try:
        with pytest.raises(AlreadyServingError, match=rf"port 8000 \(process {holder.pid}, http://127.0.0.1:8000\)"):
            ServeLock(tmp_path, 8000).acquire()
        record = serving_record(tmp_path, 8000)
        assert record is not None
        assert (record.pid, record.config_file) == (holder.pid, "c.yaml")
        ServeLock(tmp_path, 9000).acquire()
    finally:
        holder.kill()
        holder.wait()
    assert serving_record(tmp_path, 8000) is None
    ServeLock(tmp_path, 8000).acquire()


def test_one_that_has_said_nothing_yet_is_still_respected(tmp_path: Path) -> None:
    first = ServeLock(tmp_path, 8000)
    first.acquire()
    with pytest.raises(AlreadyServingError) as refusal:
        ServeLock(tmp_path, 8000).acquire()
    assert refusal.value.record is None
    first.release()
    first.release()
