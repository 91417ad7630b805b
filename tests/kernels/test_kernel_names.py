"""A kernel is called the same in every process, whatever each has launched before: what one compiled, others find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house_rules import read_sources

pytest.importorskip("triton")

NAME_ALL = """
import importlib, json, sys
from triton.runtime.jit import JITFunction
from whalepod.kernels.kernel_names import name_by_source
if sys.argv[1] == "by source":
    name_by_source()
names = {}
for path in sys.argv[2:]:
    module = importlib.import_module("whalepod.kernels." + path)
    for name, member in vars(module).items():
        if isinstance(member, JITFunction):
            names[f"{path}.{name}"] = member.cache_key
json.dump(names, sys.stdout)
"""


def modules() -> list[str]:
    """Those with kernels of Triton or Gluon."""
    has_kernels = re.compile(r"^@(triton|gluon)\.jit", re.MULTILINE)
    paths = sorted(Path(each.path) for each in read_sources(folders=("kernels",)) if has_kernels.search(each.text))
    return [".".join(path.with_suffix("").parts[1:]) for path in paths]


def names(how: str, paths: list[str]) -> dict[str, str]:
    """Of all functions of these modules, named in this order. The interpreter that other tests use names none."""
    command = [sys.executable, "-c", NAME_ALL, how, *paths]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)


def test_names_do_not_depend_on_what_was_named_before() -> None:
    forward, backward = names("by source", modules()), names("by source", modules()[::-1])
    assert len(forward) > 100
    assert forward == backward


@pytest.mark.slow
def test_triton_alone_names_by_what_was_named_before() -> None:
    """Where this fails, Triton has been mended: `kernel_names.py` can go."""
    assert names("as it does", modules()) != names("as it does", modules()[::-1])
