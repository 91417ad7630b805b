"""What is wrong in a Dockerfile, and which files an image is built from."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from tests.house_rules import ROOT

PINNED = re.compile(r"^[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$")
SECRET_NAME = re.compile(r"(SECRET|PASSWORD|TOKEN|API_KEY)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    text: str


def instructions(dockerfile: str) -> list[Instruction]:
    """Lines that go on joined, comments left out."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(name.upper(), " ".join(text.split())) for name, _, text in parts]


def lint(dockerfile: str) -> Iterator[str]:
    """A sentence for each thing that no image of ours may do."""
    steps = instructions(dockerfile)
    arguments = dict(step.text.split("=", 1) for step in steps if step.name == "ARG" and "=" in step.text)
    stages = [step for step in steps if step.name == "FROM"]
    for stage in stages:
        image = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], stage.text.split()[0])
        if not PINNED.match(image):
            yield f"{image} is no image of one version"
    if len(stages) < 2:
        yield "one stage: compilers and sources stay in the image"
    last = steps[max(index for index, step in enumerate(steps) if step.name == "FROM") :]
    users = [step.text for step in last if step.name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield "the last USER is no number above 0"
    for step in steps:
        yield from _wrong_in(step)
    if any(step.name == "COPY" and "--from=" not in step.text for step in last):
        yield "the last stage takes files from outside the build"


def _wrong_in(step: Instruction) -> Iterator[str]:
    if step.name == "ADD":
        yield "ADD: use COPY"
    if step.name in ("ENTRYPOINT", "CMD") and not step.text.startswith("["):
        yield f"{step.name} in shell form: signals would not arrive"
    if step.name in ("ENV", "ARG") and SECRET_NAME.search(step.text):
        yield f"{step.name} {step.text}: secrets stay in the layers"
    if step.name == "RUN" and "apt-get install" in step.text:
        if "--no-install-recommends" not in step.text:
            yield "apt-get install without --no-install-recommends"
        if "rm -rf /var/lib/apt/lists" not in step.text or "apt-get update" not in step.text:
            yield "apt-get update, install and the removal of its lists belong into one layer"
    if step.name == "RUN" and re.search(r"\b(curl|wget) .*\| *(sh|bash)", step.text):
        yield "a script from the network is run unread"
    if step.name == "RUN" and "pip install" in step.text and "--constraint" not in step.text:
        yield "pip install without the lock file"


def context_files() -> list[str]:
    """Committed files that `.dockerignore` lets into a build."""
    rules = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line]
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [name for name in names if any(PurePosixPath(name).is_relative_to(each) for each in allowed)]
