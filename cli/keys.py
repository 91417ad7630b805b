"""`whalepod keys`: make API keys, list them, take them back."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from whalepod.cluster.api_keys import Scope, add_api_key, read_api_keys, remove_api_key
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

KeysFile = Annotated[Path, typer.Option("--file", envvar="WHALEPOD_API_KEYS_FILE", help="The file of keys.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What the key is called in logs and usage records.")],
    file: KeysFile,
    tenant: Annotated[str, typer.Option(help="Whose prefixes, limits and bill.")],
    admin: Annotated[bool, typer.Option("--admin", help="For operators, too.")] = False,
    expires: Annotated[str | None, typer.Option(help="Its last day, as 2027-01-31.")] = None,
    priority_min: Annotated[
        int | None, typer.Option(help="Smallest priority of its requests; else router.priority_min.")
    ] = None,
) -> None:
    """Print a new key. It cannot be shown again: the file holds its hash."""
    scopes: frozenset[Scope] = frozenset({"generate", "admin"} if admin else {"generate"})
    key = add_api_key(file, name=name, tenant=tenant, scopes=scopes, expires=_day(expires), priority_min=priority_min)
    typer.echo(key)


@app.command("list")
def list_keys(file: KeysFile) -> None:
    """Show who has keys."""
    table = Table("name", "tenant", "scopes", "expires", box=None)
    for key in read_api_keys(file).values():
        last = "never" if key.expires is None else key.expires.isoformat()
        gone = " (expired)" if key.expired(SYSTEM_CLOCK.unix_ms()) else ""
        table.add_row(key.name, key.tenant, ", ".join(sorted(key.scopes)), last + gone)
    Console(highlight=False).print(table)


@app.command()
def remove(name: Annotated[str, typer.Argument(help="The key's name.")], file: KeysFile) -> None:
    """Take a key back. Running routers notice within a second."""
    remove_api_key(file, name)


def _day(text: str | None) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--expires must be a day as 2027-01-31, not {text!r}") from None
