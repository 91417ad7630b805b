"""What a process has started ends with it, however it ends; nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

# Starts a janitor, a child, and a grandchild whose parent ends at once: an orphan that ignores SIGTERM.
PARENT = """
import subprocess, sys, time
from pathlib import Path
from whalepod.cluster.janitor import Janitor
janitor = Janitor(Path(sys.argv[1]))
ignoring = "SIG_IGN" if sys.argv[2] == "die" else "SIG_DFL"
stubborn = f"import signal, time; signal.signal(signal.SIGTERM, signal.{ignoring}); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
middle = subprocess.Popen(
    [sys.executable, "-c", f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {stubborn!r}]);"
     "print(p.pid, flush=True); time.sleep(0.9)"], stdout=subprocess.PIPE, text=True, start_new_session=True)
orphan = int(middle.stdout.readline())
middle.wait()
print(child.pid, orphan, flush=True)
if sys.argv[2] == "finish":
    sys.stdin.readline()
    janitor.finish()
    print("finished", flush=True)
time.sleep(600)
"""


def start_parent(run_dir: Path, mode: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(run_dir), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]


def test_a_killed_parent_leaves_nothing_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    parent, started = start_parent(run_dir, "die")
    try:
        parent.kill()
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive
        assert bystander.poll() is None
    finally:
        parent.wait()
        bystander.kill()
        bystander.wait()


def test_finish_waits_until_what_was_left_has_ended_and_removes_the_run_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    parent, started = start_parent(run_dir, "finish")
    try:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "finished\n"
        assert not run_dir.exists()
        assert [process for process in started if _alive(process)] == []
        assert parent.poll() is None
    finally:
        parent.kill()
        parent.wait()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
