from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from whalepod.cluster.process_place import ProcessPlace

SAY_PLACE = "from whalepod.cluster.process_place import ProcessPlace as P; p = P.own(); print(p.host, p.pid, p.start_ticks, flush=True); input()"  # noqa: E501


def test_exactly_the_process_that_was_named_is_ended() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAY_PLACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        host, pid, ticks = child.stdout.readline().split()
        place = ProcessPlace(host, int(pid), int(ticks))
        assert not replace(place, start_ticks=place.start_ticks + 1).kill()  # another process of that number
        assert not replace(place, host="elsewhere").kill()
        assert child.poll() is None
        assert place.kill()
        assert child.wait() == -9
    assert not place.kill()
