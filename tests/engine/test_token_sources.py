"""What the metrics say about where a prompt's tokens came from."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import REGISTRY

from tests.engine.engine_world import GREEDY, World, prompt_of
from tests.engine.memory_store import MemoryStore
from whalepod.engine.interface import Fidelity

ONE = replace(GREEDY, max_tokens=1)


def test_prompt_tokens_are_counted_once_by_where_they_came_from() -> None:
    names = {source: ("tokens_total", "source", source) for source in ("device", "recomputed", "replayed")}
    names["rounding"] = ("lost_tokens_sum", "reason", "rounding")
    sums = dict.fromkeys(names, 0.0)

    def more() -> dict[str, float]:
        now = {
            word: REGISTRY.get_sample_value(f"whalepod_kv_{name}", {label: value}) or 0.0
            for word, (name, label, value) in names.items()
        }
        grown = {word: now[word] - sums[word] for word in now}
        sums.update(now)
        return grown

    store, fast = MemoryStore(), Fidelity.FAST
    world = World(store=store)
    more()
    world.generate(prompt_of(100), ONE, fidelity=fast)
    assert more() == {"device": 0, "recomputed": 100, "replayed": 0, "rounding": 0}
    world.generate(prompt_of(100), ONE, fidelity=fast)
    assert more() == {"device": 64, "recomputed": 36, "replayed": 16, "rounding": 8}, "R = 64, L - K = 72"
    World(store=store).generate(prompt_of(100), ONE, fidelity=fast)
    assert more() == {"device": 0, "recomputed": 36, "replayed": 16, "rounding": 8}
    world.generate((*prompt_of(40), *prompt_of(60, seed=5)), ONE, fidelity=fast)
    assert more() == {"device": 32, "recomputed": 68, "replayed": 16, "rounding": 0}, "the prefix ends before"
    world.generate(prompt_of(100), ONE, shares=False)
    assert more() == dict.fromkeys(names, 0)
