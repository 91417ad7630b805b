"""Keys are made once, kept as hashes, and a file that is wrong is refused by name."""

from __future__ import annotations

import stat
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from whalepod.cluster.api_keys import add_api_key, hash_of_key, read_api_keys, remove_api_key
from whalepod.core.errors import ConfigError


def test_a_key_is_found_by_its_hash_and_is_nowhere_written(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    first = add_api_key(file, name="ci", tenant="acme", scopes=frozenset({"generate"}), expires=None)
    second = add_api_key(
        file, name="ops", tenant="acme", scopes=frozenset({"generate", "admin"}), expires=date(2027, 1, 2)
    )
    keys = read_api_keys(file)
    assert {keys[hash_of_key(key)].name for key in (first, second)} == {"ci", "ops"}
    assert keys[hash_of_key(second)].scopes == {"generate", "admin"}
    text = file.read_text()
    assert first not in text
    assert second not in text
    assert len(first) >= 43
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    remove_api_key(file, "ci")
    assert [key.name for key in read_api_keys(file).values()] == ["ops"]


def test_a_key_works_through_its_last_day(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    minted = add_api_key(file, name="ci", tenant="a", scopes=frozenset({"generate"}), expires=date(2027, 1, 31))
    key = read_api_keys(file)[hash_of_key(minted)]
    last = int(datetime(2027, 2, 1, tzinfo=UTC).timestamp() * 1000)
    assert (key.expired(last - 1), key.expired(last)) == (False, True)


def test_names_are_given_once_and_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    add_api_key(file, name="ci", tenant="a", scopes=frozenset({"generate"}), expires=None)
    with pytest.raises(ConfigError, match="named ci already"):
        add_api_key(file, name="ci", tenant="b", scopes=frozenset({"generate"}), expires=None)
    with pytest.raises(ConfigError, match="tenant"):
        add_api_key(file, name="x", tenant="a b\n", scopes=frozenset({"generate"}), expires=None)
    with pytest.raises(ConfigError, match="no key named cd"):
        remove_api_key(file, "cd")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: [", "not YAML"),
        ("keys: 7", "keys"),
        ("kees: []", "kees"),
        ("keys: [{name: a, tenant: t, sha256: abc}]", "sha256"),
        (f"keys: [{{name: a, tenant: t, sha256: {'a' * 64}, scopes: [root]}}]", "scopes"),
        (
            f"keys: [{{name: a, tenant: t, sha256: {'a' * 64}}}, {{name: a, tenant: t, sha256: {'b' * 64}}}]",
            "a is there twice",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        read_api_keys(file)
    assert str(file) in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(tmp_path / "missing.yaml")
