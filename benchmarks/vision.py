"""What a vision pool is worth: images a second and time to the first token, with vision ranks and without.

    python benchmarks/vision.py [--images N] [--rounds N] [--at-a-time N] [--replicas 1,2]

Clusters of real processes on this machine, one after another, with the model that ships: one whose prefill and decode
ranks encode images themselves, then one for each number of vision ranks. Each is asked rounds of N conversations with
an image that it has not seen, some at a time, for one token, and each round once more. Figures are medians of the
rounds, and the least and most say how far to trust them: where those of two clusters overlap, they do not differ. A
machine that is busy with other things slows one cluster more than another: what is left then is each cluster's rate
of new images as a share of its rate of the same ones again, round by round.

What one image costs alone, on one core and in this process, says what there is to gain: the router makes it ready
(decoding, resizing and encoding it again), and whoever encodes it decodes that, resizes and runs the tower. On few
cores all processes share them, so a pool moves the second part and adds no core. The bound of the second time is what
the text and making ready cost: nothing is encoded. No peer: none runs this model. The last line is one JSON object.
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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import deepseek_recipe as recipe
import httpx
import numpy as np
import torch
from failover_cases.cluster import running_cluster
from PIL import Image

from whalepod.cluster.shipped_model import shipped_model_dir
from whalepod.model.vision.encoder import VisionEncoder
from whalepod.model.vision.pixels import patches_of_bytes
from whalepod.model.vision.preparation import ImagePreparer

ALONE_IMAGES = 8


@dataclass(frozen=True, slots=True)
class Round:
    images_per_s: float
    first_token_s: float
    """Median."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of one cluster, with images that are new to it or not."""

    rounds: tuple[Round, ...]

    @property
    def images_per_s(self) -> float:
        return median(one.images_per_s for one in self.rounds)

    @property
    def first_token_s(self) -> float:
        return median(one.first_token_s for one in self.rounds)

    def __str__(self) -> str:
        rates = [one.images_per_s for one in self.rounds]
        waits = [1000 * one.first_token_s for one in self.rounds]
        return (
            f"{self.images_per_s:.1f} images/s ({min(rates):.1f} to {max(rates):.1f}), first token after "
            f"{1000 * self.first_token_s:.0f} ms ({min(waits):.0f} to {max(waits):.0f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--replicas", default="1,2")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores; whalepod serve, 1 prefill and 1 decode rank")
    costs = costs_alone()
    print("alone, one image: " + ", ".join(f"{1000 * seconds:.0f} ms {name}" for name, seconds in costs.items()))
    counts = [0, *map(int, options.replicas.split(","))]
    found: dict[int, Rounds] = {}
    shares: dict[int, float] = {}
    for count in counts:
        cold, warm = measure(count, images=options.images, rounds=options.rounds, at_a_time=options.at_a_time)
        found[count] = cold
        shares[count] = median(
            one.images_per_s / again.images_per_s for one, again in zip(cold.rounds, warm.rounds, strict=True)
        )
        print(
            f"{count or 'no'} vision ranks (load {os.getloadavg()[0]:.1f}): {cold}\n  seen before: {warm}; "
            f"new ones at {shares[count]:.0%} of that",
            flush=True,
        )
    figures: dict[str, float] = {
        "images_per_s_inline": found[0].images_per_s,
        "first_token_s_inline": found[0].first_token_s,
        "images_per_s_separate": found[counts[1]].images_per_s,
        "first_token_s_separate": found[counts[1]].first_token_s,
    }
    figures |= {f"images_per_s_{count}_ranks": found[count].images_per_s for count in counts[1:]}
    figures |= {f"new_of_seen_{count}_ranks": share for count, share in shares.items()}
    figures |= {f"alone_s_{name.replace(' ', '_')}": seconds for name, seconds in costs.items()}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def costs_alone() -> dict[str, float]:
    """Seconds of each part of one image, on one core: medians."""
    torch.set_num_threads(1)
    encoder = VisionEncoder.load(shipped_model_dir())
    preparer = ImagePreparer(encoder.config)
    seconds: dict[str, list[float]] = {"to make ready": [], "to decode again": [], "in the tower": []}
    for seed in range(ALONE_IMAGES + 1):
        source = recipe.BytesImageSource(picture(seed))
        times = [time.perf_counter()]
        (image,) = preparer.begin([source], field="messages").all()
        times.append(time.perf_counter())
        patches = patches_of_bytes(image.data, encoder.config)
        times.append(time.perf_counter())
        encoder.encode([patches])
        times.append(time.perf_counter())
        for name, (began, ended) in zip(seconds, pairwise(times), strict=True):
            seconds[name].append(ended - began)
    return {name: median(each[1:]) for name, each in seconds.items()}  # the first warms up


def measure(vision: int, *, images: int, rounds: int, at_a_time: int) -> tuple[Rounds, Rounds]:
    """First and second time of each round."""
    cold: list[Round] = []
    warm: list[Round] = []
    with (
        tempfile.TemporaryDirectory(prefix="vision-") as directory,
        running_cluster(Path(directory), prefill=1, decode=1, vision=vision) as cluster,
    ):
        # A round before all, so that whatever is made at first use is made.
        for number in range(rounds + 1):
            bodies = [body_of(seed) for seed in range(number * images, (number + 1) * images)]
            cold.append(asyncio.run(ask_all(cluster.url, bodies, at_a_time=at_a_time)))
            warm.append(asyncio.run(ask_all(cluster.url, bodies, at_a_time=at_a_time)))
    return Rounds(tuple(cold[1:])), Rounds(tuple(warm[1:]))


def body_of(seed: int) -> dict[str, Any]:
    """A question about a picture that nobody else asks about."""
    url = f"data:image/jpeg;base64,{base64.b64encode(picture(seed)).decode()}"
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "thinking": {"type": "disabled"}, "max_tokens": 1}


def picture(seed: int) -> bytes:
    """A JPEG of 480 × 360 pixels: noise, which costs more than a photograph."""
    pixels = np.random.default_rng(seed).integers(0, 256, (360, 480, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "JPEG", quality=80)
    return held.getvalue()


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
