"""`whalepod top`: what the dashboard of a router shows, in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whalepod.core.errors import ServingError

from .chat import DEFAULT_URL, ApiKey, CaFile, Url
from .event_stream import Server, snapshots

PATH = "/dashboard/events"
BAR_CELLS = 10
PIPE_COLUMNS = 160

Snapshot = Mapping[str, Any]


def top(
    url: Url = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print the state of now and leave.")] = False,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
) -> None:
    """Show ranks with their load, requests, and rates, once a second, until Ctrl-C.

    With router.admin_port, --url names that port.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    server = Server(url, api_key, ca_file)
    try:
        if once:
            console.print(screen(next(snapshots(server, PATH)), None))
            return
        before: Snapshot | None = None
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            for now in snapshots(server, PATH):
                live.update(screen(now, before), refresh=True)
                before = now
        console.print("the router has closed the connection")
        raise typer.Exit(1)
    except ServingError as error:
        console.print(f"whalepod: {escape(str(error))}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        return


def screen(now: Snapshot, before: Snapshot | None) -> RenderableType:
    """All that is shown of one snapshot; rates are those since the one before."""
    readiness = now["readiness"]
    ready = readiness["status"] == "ready"
    state = Text("ready", style="green") if ready else Text("; ".join(readiness["reasons"]), style="red")
    head = Text.assemble(
        (str(now["model"]), "bold"),
        f"  version {now['version']}  store {readiness['store']}  registry {readiness['registry']}  ",
        state,
    )
    process, processes = now["process"]
    if processes > 1:
        head.append(f"  process {process} of {processes}: requests and rates are its own", style="yellow")
    return Group(head, _rates(now, before), _ranks(now))


def _rates(now: Snapshot, before: Snapshot | None) -> Text:
    seconds = 0.0 if before is None else (now["time_unix_ms"] - before["time_unix_ms"]) / 1000
    parts = [f"requests: {now['running']} running, {now['waiting']} waiting"]
    for name, what in (("requests", "requests/s"), ("completion_tokens", "tokens/s"), ("shed", "refused/s")):
        if before is not None and seconds > 0:
            grown = _total(now, name) - _total(before, name)
            parts.append(f"{max(0.0, grown) / seconds:.1f} {what}")
    prompt = _total(now, "prompt_tokens")
    if prompt:
        parts.append(f"{_total(now, 'cached_tokens') / prompt:.0%} of prompt tokens restored")
    parts.append(f"failovers {_total(now, 'failovers'):.0f}, broken {_total(now, 'streams_broken'):.0f}")
    return Text("   ".join(parts))


def _ranks(now: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "role", "state", "requests", "waiting", "blocks", "prompt rows", "drafts", "address"):
        table.add_column(name, no_wrap=True)
    for rank in now["ranks"]:
        told = rank["numbers"]
        verified = told.get("drafts_verified", 0)
        table.add_row(
            rank["rank"],
            rank["role"].replace("_", " "),
            Text("draining", style="red") if rank["draining"] else Text("serving", style="green"),
            _bar(rank["running"], rank["slots"]),
            str(rank["waiting"]),
            _bar(rank["blocks_used"], rank["blocks"]),
            str(rank["prompt_rows"]),
            f"{told['drafts_accepted'] / verified:.0%}" if verified else "-",
            rank["address"],
        )
    return table


def _bar(used: int, whole: int) -> Text:
    cells = min(BAR_CELLS, round(BAR_CELLS * used / whole)) if whole else 0
    return Text.assemble(("█" * cells, "blue"), ("·" * (BAR_CELLS - cells), "dim"), f" {used}/{whole}")


def _total(snapshot: Snapshot, counter: str) -> float:
    return sum(snapshot["counters"][counter].values())
