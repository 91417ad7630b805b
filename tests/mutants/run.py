"""`make mutants`: plants one bug after the other into a copy of the sources and sees which check notices.

Prints a table, and as its last line one JSON object with `mutants` and `caught`. Fails if a bug is not noticed, or if
the unchanged sources do not pass.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

# Imported once: every bug is tried in a fork, which finds the sources of its own copy. Nothing of ours is imported yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from rich.console import Console
from rich.table import Table

from tests.mutants.planted_bug import ROOT, Arithmetic, PlantedBug
from tests.mutants.planted_bugs import BUGS
from tests.native_build import build, compiler

PACKAGE = Path("src") / "whalepod"
LIMIT_S = 300


def copy_sources(target: Path, bug: PlantedBug | None) -> None:
    """An import root in `target` that links to our folders, but for the one that the bug is in."""
    package = target / PACKAGE
    package.mkdir(parents=True)
    mutated = bug.file.split("/", 1)[0] if bug else None
    for entry in (ROOT / PACKAGE).iterdir():
        if entry.name == mutated:
            shutil.copytree(entry, package / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry.resolve())
    if bug is not None:
        path = package / bug.file
        path.write_text(bug.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
        if bug.compiled:
            build(path.parent)


def look_for_bug(import_root: Path, arithmetic: Arithmetic, answer: Connection) -> None:
    """In a process of its own: run the checks against the sources of `import_root`."""
    sys.path.insert(0, str(import_root))
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    try:
        from tests.mutants import checks
    except Exception as error:  # noqa: BLE001  a bug may show as early as that
        answer.send(f"import: {error!r}")
        return
    import whalepod.model
    from whalepod.kernels.native import library

    loaded = next(iter(whalepod.model.__path__))
    assert Path(loaded).is_relative_to(import_root), f"checked {loaded}, not the copy"
    assert arithmetic is not Arithmetic.OPERATORS or library.available(), library.REASON_MISSING
    library.choose(wanted=arithmetic is not Arithmetic.REFERENCE)
    answer.send(checks.first_to_notice())


def noticed_by(bug: PlantedBug | None, arithmetic: Arithmetic) -> str | None:
    """The check that notices the bug; None if all pass."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="whalepod-mutant-") as directory:
        copy_sources(Path(directory), bug)
        process = context.Process(target=look_for_bug, args=(Path(directory) / "src", arithmetic, sender))
        process.start()
        sender.close()
        try:
            answer = receiver.recv() if receiver.poll(LIMIT_S) else f"no end within {LIMIT_S} s"
        except EOFError:
            answer = "crash"
        if process.is_alive() and answer is not None:
            process.terminate()
        process.join()
    return answer


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    chosen = [bug for bug in BUGS if not sys.argv[1:] or any(word in bug.name for word in sys.argv[1:])]
    if compiler() is None:
        console.print("There is no C compiler: the compiled operators are left out.")
        chosen = [bug for bug in chosen if not bug.compiled]
    for arithmetic in Arithmetic:
        if arithmetic in {bug.arithmetic for bug in chosen} and (control := noticed_by(None, arithmetic)) is not None:
            console.print(f"The unchanged sources do not pass with {arithmetic.value}: {control}")
            return 1
    table = Table("planted bug", "file", "noticed by")
    caught = 0
    with console.status("") as status:
        for bug in chosen:
            status.update(bug.name)
            check = noticed_by(bug, bug.arithmetic)
            caught += check is not None
            table.add_row(bug.name, bug.file, check or "[bold red]nothing[/]")
    console.print(table)
    sys.stdout.write(json.dumps({"mutants": len(chosen), "caught": caught}) + "\n")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
