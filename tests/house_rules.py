"""The house's rules, read from the source of every module. `test_architecture.py` applies them and tests them.

A rule is a function from one parsed source file to what is wrong in it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
PRODUCT_FOLDERS = ("cli", "cluster", "core", "engine", "kernels", "kvstore", "model", "services", "training")
CODE_FOLDERS = (*PRODUCT_FOLDERS, "benchmarks", "tests")

FUNCTION_LINES_MAX = 70
KERNEL_LINES_MAX = 140
"""For a function that runs on a GPU: its accumulators live in registers, and cutting it in two would pass them all."""
FILE_LINES_MAX = 450
BANNED_NAMES = frozenset({"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"})
BANNED_CLASS = re.compile(r"(Manager|Helper|Helpers|Util|Utils)$")

CLOCKS = frozenset(
    {
        f"time.{name}{unit}"
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        for unit in ("", "_ns")
    }
    | {f"datetime.{name}" for name in ("datetime.now", "datetime.utcnow", "datetime.today", "date.today")}
)
BENCHMARK_CLOCKS = frozenset({"time.perf_counter", "time.perf_counter_ns", "time.process_time"})
ENTROPY = ("secrets.", "uuid.uuid1", "uuid.uuid4", "os.urandom")
TORCH_DRAWS = frozenset(
    f"torch.{name}"
    for name in (
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "rand_like",
        "randn_like",
    )
)
IN_PLACE_DRAWS = frozenset({"uniform_", "normal_", "exponential_", "random_", "bernoulli_", "cauchy_", "log_normal_"})
ENVIRONMENT_WRITES = frozenset({"setdefault", "update", "pop"})


@dataclass(frozen=True)
class Source:
    """One Python file. `path` is relative to the repository."""

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def folder(self) -> str:
        return self.path.parts[0]

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """What each imported name stands for: `import numpy as np` gives np → numpy."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    def dotted(self, node: ast.expr) -> str:
        """`np.random.rand` as `numpy.random.rand`; empty when the chain does not start at an imported name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def references(self) -> Iterator[tuple[ast.expr, str]]:
        """Every use of something imported, with its full name."""
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and (name := self.dotted(node)):
                yield node, name

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in self.nodes if isinstance(node, ast.Call))

    def imported_modules(self) -> Iterator[tuple[int, str]]:
        """Line and full name of everything that is imported, with relative names resolved."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = ["whalepod", *self.path.parts[: -node.level]] if node.level else []
                base = ".".join([*package, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@functools.cache
def read_sources(folders: tuple[str, ...] = CODE_FOLDERS) -> tuple[Source, ...]:
    """Every module of `folders`, read and parsed once a run."""
    return tuple(source for folder in folders for source in _read_folder(folder))


@functools.cache
def _read_folder(folder: str) -> list[Source]:
    return [
        Source(PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def allowed_imports(architecture: str) -> dict[str, frozenset[str]]:
    """Which folders each folder may import, read from the table of `docs/architecture.md`."""
    rows = re.findall(r"^\| `(\w+)/[^`]*` \|[^|]*\| ([^|]*) \|$", architecture, flags=re.MULTILINE)
    allowed: dict[str, frozenset[str]] = {}
    for folder, cell in rows:
        listed = re.match(r"`([a-z ]+)`", cell)
        names = listed.group(1).split() if listed else [*PRODUCT_FOLDERS, "rpc"] if cell == "everything" else []
        allowed[folder] = frozenset(names) | {folder}
    return allowed


def wrong_imports(source: Source, allowed: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Imports that point up, across services, or at a root folder by its own name."""
    if source.folder not in allowed:
        return
    for line, name in source.imported_modules():
        parts = name.split(".")
        if parts[0] in PRODUCT_FOLDERS:
            yield f"{source.path}:{line} imports {name}: say whalepod.{name}"
        if parts[0] != "whalepod" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        if parts[1] not in allowed[source.folder]:
            yield f"{source.path}:{line} imports {name}: {source.folder}/ may import {sorted(allowed[source.folder])}"
        own_service = source.path.parts[1] if source.folder == "services" else None
        if own_service and parts[1] == "services" and parts[2:3] != [own_service]:
            yield f"{source.path}:{line} imports {name}: services talk through proto/"


def far_names_for_near_modules(source: Source) -> Iterator[str]:
    """A module names its neighbours with a dot, so that a folder can move as one."""
    if source.folder not in PRODUCT_FOLDERS:
        return
    here = ".".join(["whalepod", *source.path.parts[:-1]]) + "."
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(here):
            near = f"{node.module}.".removeprefix(here)[:-1]
            yield f"{source.path}:{node.lineno} imports {node.module}: say from .{near}"


def banned_names(source: Source) -> Iterator[str]:
    for part in (*source.path.parts[:-1], source.path.stem):
        if part.lower() in BANNED_NAMES:
            yield f"{source.path} is named {part}: name what it does"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and BANNED_CLASS.search(node.name):
            yield f"{source.path}:{node.lineno} class {node.name}: name what it does"


def long_code(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{source.path} has {lines} lines, more than {FILE_LINES_MAX}: look for the second idea inside"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            lines_max = KERNEL_LINES_MAX if _runs_on_a_gpu(source, node) else FUNCTION_LINES_MAX
            if lines > lines_max:
                yield f"{source.path}:{node.lineno} {node.name} has {lines} lines, more than {lines_max}"


def _runs_on_a_gpu(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    named = [source.dotted(node) for node in decorators]
    return source.path.name.endswith("_kernel.py") and any(name.endswith((".jit", ".prim_func")) for name in named)


def wall_clocks(source: Source) -> Iterator[str]:
    if source.path == PurePosixPath("core/clock.py"):
        return
    allowed = BENCHMARK_CLOCKS if source.folder == "benchmarks" else frozenset[str]()
    for node, name in source.references():
        if name in CLOCKS - allowed:
            yield f"{source.path}:{node.lineno} reads {name}: take a Clock (core/clock.py)"
    for call in source.calls():
        match call.func:
            case ast.Attribute(value=ast.Call(func=loop), attr="time") if source.dotted(loop).endswith("_loop"):
                yield f"{source.path}:{call.lineno} reads the event loop's clock: take a Clock (core/clock.py)"
            case _:
                pass


def sleeps_outside_loops(source: Source) -> Iterator[str]:
    """A sleep between two polls is honest; a sleep that hopes something is ready by then is not."""
    polls = [node for node in source.nodes if isinstance(node, ast.While | ast.For | ast.AsyncFor)]
    honest = {id(inner) for poll in polls for inner in ast.walk(poll)}
    for node, name in source.references():
        if name == "time.sleep" and id(node) not in honest:
            yield f"{source.path}:{node.lineno} sleeps instead of waiting for something"


def unseeded_randomness(source: Source) -> Iterator[str]:
    if source.path == PurePosixPath("core/ids.py"):
        return
    for node, name in source.references():
        if name.startswith(ENTROPY):
            yield f"{source.path}:{node.lineno} draws from {name}: only core/ids.py does"
    # A test may seed torch's own generator; inside the product it belongs to somebody else.
    torch_is_seeded = source.folder in ("tests", "benchmarks") and "torch.manual_seed(" in source.text
    for call in source.calls():
        if _draws_from_hidden_state(source.dotted(call.func), call):
            yield f"{source.path}:{call.lineno} draws without a seed: use a seeded generator"
        elif not torch_is_seeded and _draws_from_torch(source.dotted(call.func), call):
            yield f"{source.path}:{call.lineno} draws without generator="


def _draws_from_hidden_state(name: str, call: ast.Call) -> bool:
    if name in ("random.Random", "numpy.random.default_rng", "numpy.random.SeedSequence"):
        return not call.args and not call.keywords
    module, _, function = name.rpartition(".")
    return module in ("random", "numpy.random") and function[:1].islower()


def _draws_from_torch(name: str, call: ast.Call) -> bool:
    in_place = isinstance(call.func, ast.Attribute) and call.func.attr in IN_PLACE_DRAWS
    return (name in TORCH_DRAWS or in_place) and all(keyword.arg != "generator" for keyword in call.keywords)


def prints(source: Source) -> Iterator[str]:
    if source.folder in ("cli", "benchmarks"):
        return
    for call in source.calls():
        if isinstance(call.func, ast.Name) and call.func.id == "print":
            yield f"{source.path}:{call.lineno} prints"


def environment_reads(source: Source) -> Iterator[str]:
    """Settings are read once, where a process starts; setting a variable for a child is not a read."""
    if source.folder in ("cli", "tests", "benchmarks") or source.path.name in ("main.py", "__main__.py"):
        return
    if source.path == PurePosixPath("engine/llm.py"):
        return  # the offline interface is where somebody's own program starts us
    writes: set[int] = set()
    for node in source.nodes:
        match node:
            case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()):
                writes.add(id(target))
            case ast.Attribute(value=target, attr=attr) if attr in ENVIRONMENT_WRITES:
                writes.add(id(target))
            case _:
                pass
    for node, name in source.references():
        if name in ("os.getenv", "os.environ") and id(node) not in writes:
            yield f"{source.path}:{node.lineno} reads {name}: take the value as a setting"


def machine_paths(text: str, path: str) -> Iterator[str]:
    """Paths of somebody's machine. A path that a service manager or container owns (`/etc`, `/var`, `/usr`) is fine."""
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(r"(?<![\w.}/])/(work|root|home|mnt|farm)/\w", line):
            yield f"{path}:{number} names a path of one machine"


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    far_names_for_near_modules,
    banned_names,
    long_code,
    wall_clocks,
    sleeps_outside_loops,
    unseeded_randomness,
    prints,
    environment_reads,
)
