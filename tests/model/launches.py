"""Steps whose launches are only compiled, in a process of its own each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.house_rules import ROOT

LAUNCH = """
import json, sys
from pathlib import Path
from triton import knobs
from whalepod.model import kernel_cache
hits = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.append((src.name, cache_hit))
launches = kernel_cache.Launches(int(sys.argv[2]), own=int(sys.argv[3]), of=int(sys.argv[4]))
kernel_cache.launch_steps(kernel_cache.released_config(Path(sys.argv[1])), sequences=1)
names = sorted({name for name, _ in launches.seen})
told = {"seen": names, "count": len(launches.seen), "hits": hits, "too_large": sorted(launches.too_large)}
json.dump(told, sys.stdout)
"""


def small_config(directory: Path) -> Path:
    """Three layers, with sources of global KV of both ratios and an n-gram layer, and heads as released."""
    values = json.loads((ROOT / "model/released_config.json").read_text(encoding="utf-8"))
    values["text_config"] |= {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    for name in ("engram_layer_ids", "engram_num_embeddings"):
        del values["text_config"][name][1:]
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory / "config.json"


def launched(
    config: Path, cache: Path, *, architecture: int, own: int = 0, of: int = 1, python: str = sys.executable
) -> dict[str, Any]:
    """Of decode steps of one sequence and of chunks: names of the kernels, how many launches differ, and for each that
    was compiled whether it was there. Every `of`-th is compiled, from the `own`-th on."""
    words = [python, "-c", LAUNCH, str(config), *map(str, (architecture, own, of))]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        words, cwd=cache.parent, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
