"""Complete some prompts in this process, without a cluster.

    python examples/offline_inference.py [CHECKPOINT_DIRECTORY]

Without a directory, a small random model is written first: what it says means nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from whalepod import LLM, SamplingParams
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

PROMPTS = ["The capital of France is", "Whales are", "1, 1, 2, 3, 5, 8,"]


def main(model_dir: Path) -> None:
    llm = LLM(model_dir, context_tokens_max=512)
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16)
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, sampling, use_tqdm=True), strict=True):
        print(f"{prompt!r} -> {result.output.text!r}" if result.error is None else f"{prompt!r}: {result.error}")
    (answer,) = llm.chat([{"role": "user", "content": "What do whales eat?"}], sampling)
    print(f"chat -> {answer.output.text!r}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            write_tiny_checkpoint(Path(directory) / "model")
            main(Path(directory) / "model")
