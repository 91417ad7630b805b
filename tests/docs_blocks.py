"""The fenced blocks of the pages. Every fence says what it holds; a block of commands is run by a test, or says in its
first line what it needs that a test has not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.house_rules import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "training/README.md",
    *sorted((ROOT / "models").glob("*/MODEL_CARD.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LANGUAGES = frozenset({"sh", "python", "text"})
NEEDS = frozenset(
    {"a container engine", "a Kubernetes cluster", "a Ray cluster", "a GPU", "the corpus", "the network, once"}
)
"""What commands may need that neither a test nor every machine has."""
PROGRAMS = "whalepod|make|python3?|pip|uv|curl|docker|helm|kubectl|ray|git|cd|apt-get|export|promtool"
COMMAND = re.compile(rf"^\s*(\$ |sudo |(\S*/)?({PROGRAMS})\s)")
_NEED = "# needs: "


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    """Of its fence, from 1."""
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> str | None:
        """None: a test runs it."""
        first = self.text.partition("\n")[0]
        return first.removeprefix(_NEED) if first.startswith(_NEED) else None


def blocks(page: Path, text: str) -> Iterator[Block]:
    for match in re.finditer(r"^ *```([^\n]*)\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2])


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page, page.read_text(encoding="utf-8"))]


def run_by_tests() -> Sequence[Block]:
    """Blocks of commands that need nothing special."""
    return [block for block in all_blocks() if block.language == "sh" and block.needs is None]


def wrong_in(block: Block) -> Iterator[str]:
    """A sentence for each thing that keeps a command from being run or marked."""
    if block.language not in LANGUAGES:
        yield f"the fence says {block.language!r}: one of {', '.join(sorted(LANGUAGES))}"
    if block.language == "text":
        yield from (
            f"{line!r} looks like a command: the fence should say sh"
            for line in block.text.splitlines()
            if COMMAND.match(line)
        )
    if block.language == "sh" and block.needs is not None and block.needs not in NEEDS:
        yield f"it needs {block.needs!r}, which is none of: {'; '.join(sorted(NEEDS))}"
    if _NEED in block.text.partition("\n")[2]:
        yield "what it needs belongs into its first line"
