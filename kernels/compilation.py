"""Compiles every GPU kernel at the released model's shapes for the chips we serve on. Needs no GPU.

    python -m whalepod.kernels.compilation

Prints one line a failure, and last one JSON object: kernels, sm_90_failed, sm_100_failed.
"""

from __future__ import annotations

import json
import sys

from whalepod.core.progress import ProgressReport

from .compiled_kernels import ARCHITECTURES, kernels
from .tilelang_programs import programs


def main() -> None:
    failed: dict[int, int] = dict.fromkeys(ARCHITECTURES, 0)
    listed = [*kernels(), *programs()]
    work = [(kernel, architecture) for kernel in listed for architecture in kernel.architectures]
    with ProgressReport("compiling", unit="kernels", total=len(work), say=_say) as report:
        for kernel, architecture in work:
            try:
                kernel.compile(architecture)
            except Exception as error:  # noqa: BLE001  whatever the compiler raises is what this reports
                failed[architecture] += 1
                summary = str(error).strip().splitlines() or [type(error).__name__]
                _say(f"{kernel.operation}.{kernel.name} {dict(kernel.constants)} sm_{architecture}: {summary[-1]}")
            report.advance()
        report.finish()
    figures = {"kernels": len(listed)} | {f"sm_{architecture}_failed": count for architecture, count in failed.items()}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(any(failed.values()))


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
