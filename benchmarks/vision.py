"""What a vision pool is worth: images a second and time to the first token, with vision ranks and without.

    python benchmarks/vision.py [--images N] [--at-a-time N] [--replicas 1,2]

Clusters of real processes on this machine, one after another, with the model that ships: one whose prefill and decode
ranks encode images themselves, then one for each number of vision ranks. Each is asked N conversations with an image
that it has not seen, some at a time, for one token, and then the same once more. The bound of the second round is what
the text costs: nothing is encoded. On few cores all processes share them, so a pool moves work and adds none; what it
gains there is that prefill goes on meanwhile. No peer: none runs this model. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from failover_cases.cluster import running_cluster
from PIL import Image


@dataclass(frozen=True, slots=True)
class Round:
    images_per_s: float
    first_token_s: float
    """Median."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--replicas", default="1,2")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores; whalepod serve, 1 prefill and 1 decode rank")
    counts = [0, *map(int, options.replicas.split(","))]
    rounds: dict[int, tuple[Round, Round]] = {}
    for count in counts:
        rounds[count] = measure(count, images=options.images, at_a_time=options.at_a_time)
        cold, warm = rounds[count]
        print(
            f"{count or 'no'} vision ranks: {cold.images_per_s:.1f} images/s, first token after "
            f"{1000 * cold.first_token_s:.0f} ms; seen before: {warm.images_per_s:.1f}/s, "
            f"{1000 * warm.first_token_s:.0f} ms"
        )
    figures: dict[str, float] = {
        "images_per_s_inline": rounds[0][0].images_per_s,
        "first_token_s_inline": rounds[0][0].first_token_s,
        "images_per_s_separate": rounds[counts[1]][0].images_per_s,
        "first_token_s_separate": rounds[counts[1]][0].first_token_s,
    }
    figures |= {f"images_per_s_{count}_ranks": rounds[count][0].images_per_s for count in counts[1:]}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def measure(vision: int, *, images: int, at_a_time: int) -> tuple[Round, Round]:
    """First and second time."""
    bodies = [body_of(seed) for seed in range(images + at_a_time)]
    with (
        tempfile.TemporaryDirectory(prefix="vision-") as directory,
        running_cluster(Path(directory), prefill=1, decode=1, vision=vision) as cluster,
    ):
        asyncio.run(ask_all(cluster.url, bodies[images:], at_a_time=at_a_time))  # whatever is made at first use is made
        cold = asyncio.run(ask_all(cluster.url, bodies[:images], at_a_time=at_a_time))
        warm = asyncio.run(ask_all(cluster.url, bodies[:images], at_a_time=at_a_time))
    return cold, warm


def body_of(seed: int) -> dict[str, Any]:
    """A question about a picture that nobody else asks about."""
    pixels = np.random.default_rng(seed).integers(0, 256, (360, 480, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "JPEG", quality=80)
    url = f"data:image/jpeg;base64,{base64.b64encode(held.getvalue()).decode()}"
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "thinking": {"type": "disabled"}, "max_tokens": 1}


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], *, at_a_time: int) -> Round:
    slots = asyncio.Semaphore(at_a_time)
    seconds: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:

        async def ask(body: dict[str, Any]) -> None:
            async with slots:
                began = time.perf_counter()
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                seconds.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*map(ask, bodies))
        took = time.perf_counter() - began
    return Round(len(bodies) / took, median(seconds))


if __name__ == "__main__":
    main()
