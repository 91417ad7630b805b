"""The file of API keys: who may ask, for which tenant, and what for.

    keys:
      - name: ci                  # stands in logs and in usage records
        tenant: acme
        sha256: 9f86d081…         # of the key, which is nowhere written down
        scopes: [generate]        # and admin: what operators do
        expires: 2027-01-31       # last day, UTC; left out: never
        priority_min: -10         # smallest `priority` it may have; left out: router.priority_min

A key is 256 random bits, so that its plain hash cannot be guessed back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whalepod.core.errors import ConfigError
from whalepod.core.ids import mint_api_key

Scope = Literal["generate", "admin"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._@:/-]{1,128}$")]


class ApiKey(BaseModel):
    """One key. `sha256` in hexadecimal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    tenant: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: frozenset[Scope] = frozenset({"generate"})
    expires: date | None = None
    priority_min: int | None = None

    def expired(self, unix_ms: int) -> bool:
        if self.expires is None:
            return False
        end = datetime.combine(self.expires, time(), UTC) + timedelta(days=1)
        return unix_ms >= end.timestamp() * 1000


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[ApiKey, ...] = ()


def hash_of_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_api_keys(path: Path) -> Mapping[str, ApiKey]:
    """Keys by their hash. Raises ConfigError naming the file and what is wrong with it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"api_keys_file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file {path} is not YAML: {error}") from None
    try:
        keys = _KeysFile.model_validate(values or {}).keys
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"api_keys_file {path}: {where}: {problem['msg']}") from None
    for names in ([key.name for key in keys], [key.sha256 for key in keys]):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"api_keys_file {path}: {twice[0]} is there twice")
    return {key.sha256: key for key in keys}


def add_api_key(
    path: Path,
    *,
    name: str,
    tenant: str,
    scopes: frozenset[Scope],
    expires: date | None,
    priority_min: int | None = None,
) -> str:
    """The new key, which cannot be had again: only its hash is written. Raises ConfigError."""
    known = dict(read_api_keys(path)) if path.exists() else {}
    if any(key.name == name for key in known.values()):
        raise ConfigError(f"{path} has a key named {name} already: choose another name, or remove it")
    minted = mint_api_key()
    try:
        key = ApiKey(
            name=name,
            tenant=tenant,
            sha256=hash_of_key(minted),
            scopes=scopes,
            expires=expires,
            priority_min=priority_min,
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ConfigError(f"{problem['loc'][0]}: {problem['msg']}, not {problem['input']!r}") from None
    _write(path, {**known, key.sha256: key})
    return minted


def remove_api_key(path: Path, name: str) -> None:
    """Raises ConfigError if there is none of that name."""
    known = read_api_keys(path)
    if all(key.name != name for key in known.values()):
        raise ConfigError(f"{path} has no key named {name}")
    _write(path, {sha256: key for sha256, key in known.items() if key.name != name})


def _write(path: Path, keys: Mapping[str, ApiKey]) -> None:
    """In one step: a router reads the old file or the new one."""
    records = [key.model_dump(mode="json", exclude_none=True) for key in keys.values()]
    text = yaml.safe_dump(
        {"keys": [{**record, "scopes": sorted(record["scopes"])} for record in records]}, sort_keys=False
    )
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o600)
    os.replace(new, path)
