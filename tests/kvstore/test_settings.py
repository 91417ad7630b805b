from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from whalepod.core.errors import ConfigError
from whalepod.kvstore.settings import StoreAddress, StoreSettings


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("redis://10.0.0.1", StoreAddress(host="10.0.0.1")),
        ("redis://cache:6380/2", StoreAddress(host="cache", port=6380, database=2)),
        ("cache:6380", StoreAddress(host="cache", port=6380)),
        ("redis://[::1]:6380/", StoreAddress(host="::1", port=6380)),
        ("redis://:p%40ss@h", StoreAddress(host="h", password="p@ss")),
        ("redis://engine:secret@h:1", StoreAddress(host="h", port=1, username="engine", password="secret")),
        ("unix:///run/redis.sock?db=3", StoreAddress(path="/run/redis.sock", database=3)),
    ],
)
def test_addresses_are_read_as_operators_write_them(text: str, address: StoreAddress) -> None:
    assert StoreAddress.parse(text) == address


@pytest.mark.parametrize("text", ["", "redis://", "unix://", "http://h", "redis://h:port", "redis://h/x", "rediss://h"])
def test_an_address_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="store address"):
        StoreAddress.parse(text)


def test_a_password_is_in_no_text_about_an_address() -> None:
    address = StoreAddress.parse("redis://engine:secret@[::1]:6380/1")
    assert str(address) == "[::1]:6380/1"
    assert "secret" not in repr(address)
    with pytest.raises(ConfigError) as caught:
        StoreAddress.parse("redis://engine:secret@h:port")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"retention_s": 200.0}, ["retention_s", "tilt_s_max"]),
        ({"retention_s": 8 * 24 * 3600.0}, ["retention_s", "604800"]),
        ({"data_connections": 0}, ["data_connections"]),
        ({"batch_bytes_max": 2, "value_bytes_max": 1}, ["batch_bytes_max", "value_bytes_max"]),
        ({"addresses": (StoreAddress(host="a"), StoreAddress(host="a"))}, ["twice"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(given: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        StoreSettings(**given)
    assert all(name in str(caught.value) for name in names)


def test_the_order_of_depth_survives_up_to_the_tilts_cap() -> None:
    settings = StoreSettings()
    lives = [settings.block_life_ms(depth) for depth in range(7000)]
    assert lives[0] == 86_400_000
    assert all(shallow > deep for shallow, deep in pairwise(lives[:6001]))
    assert lives[6000:] == [86_400_000 - 300_000] * 1000
