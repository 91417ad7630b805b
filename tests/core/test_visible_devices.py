"""`CUDA_VISIBLE_DEVICES` as the driver reads it. Cases of one device were asked of a real one."""

from __future__ import annotations

import pytest

from whalepod.core.errors import ConfigError
from whalepod.core.visible_devices import visible_devices

ONE = ["GPU-181c04a6-3cef-646c-d416-a7f08faee1da"]
UUID = ONE[0]
FOUR = [
    "GPU-181c04a6-3cef-646c-d416-a7f08faee1da",
    "GPU-181c9999-0000-1111-2222-333344445555",
    "GPU-2b000000-aaaa-bbbb-cccc-ddddeeeeffff",
    "GPU-f0000000-aaaa-bbbb-cccc-ddddeeeeffff",
]


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [0]),
        ("", []),
        ("0", [0]),
        ("-1", []),
        ("0,-1", [0]),
        ("-1,0", []),
        ("0,1", [0]),
        ("1,0", []),
        ("7", []),
        ("x", []),
        ("0,x", [0]),
        ("x,0", []),
        ("0,x,0", [0]),
        ("0,-1,0,0", [0]),
        (",0", []),
        ("0,,0", [0]),
        ("0x0", [0]),
        ("00", [0]),
        ("+0", [0]),
        ("-0", [0]),
        ("+-0", []),
        ("--1", []),
        (" 0", [0]),
        ("\t0", [0]),
        ("0 ", [0]),
        ("0gpu1", [0]),
        ("0.5", [0]),
        ("0;1", [0]),
        ("0-1", [0]),
        ("4294967296", [0]),
        ("-4294967296", [0]),
        ("18446744073709551616", []),
        ("０", []),
        ("NoDevFiles", []),
        (UUID, [0]),
        (UUID + "x", [0]),
        (UUID.replace("GPU", "gpu"), []),
        ("GPU-" + UUID[4:].upper(), [0]),
        ("GPU-" + UUID[4:].replace("-", ""), [0]),
        ("GPU-181c-04a6-3cef-646c-d416-a7f08faee1da", [0]),
        ("GPU-181c", [0]),
        ("GPU-1", [0]),
        ("GPU-181c04a6-", [0]),
        ("GPU-", []),
        ("GPU-181cz", []),
        ("GPU-181c ", []),
        ("GPU-zz", []),
        ("GPU-zz," + UUID, []),
        (UUID + ",GPU-zz", [0]),
        (UUID + ",", [0]),
        (UUID + ",-1," + UUID, [0]),
        (UUID + ", " + UUID, [0]),
        (UUID + ",0", [0]),
        ("0," + UUID, [0]),
        ("0,," + UUID, [0]),
        (" " + UUID, []),
        (UUID[4:], []),
        ("MIG-" + UUID, []),
    ],
)
def test_one_device_is_visible_or_not_as_the_driver_says(variable: str | None, visible: list[int]) -> None:
    assert visible_devices(variable, ONE) == tuple(visible)


@pytest.mark.parametrize(
    "variable",
    ["0,0", "0,0,0", "0 ,0", "0,00", "-0,0", "0,4294967296", f"{UUID},{UUID}", f"{UUID},GPU-181c0", f"{UUID} ,{UUID}"],
)
def test_a_device_that_is_named_twice_is_an_error_as_it_is_to_the_driver(variable: str) -> None:
    with pytest.raises(ConfigError, match="names device 0 twice"):
        visible_devices(variable, ONE)


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [0, 1, 2, 3]),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("3,0,1,2", [3, 0, 1, 2]),
        ("1,4,2", [1]),
        ("GPU-f,GPU-2b", [3, 2]),
        ("GPU-181c", []),
        ("GPU-181c0,GPU-181c9", [0, 1]),
        ("GPU-2b,1,GPU-f", [2]),
        ("1,GPU-2b,0", [1]),
        ("GPU-2b,MIG-f,GPU-f", [2]),
    ],
)
def test_several_devices_are_counted_in_the_order_of_the_list(variable: str | None, visible: list[int]) -> None:
    assert visible_devices(variable, FOUR) == tuple(visible)


@pytest.mark.parametrize(
    ("variable", "offset", "count", "taken"),
    [
        (None, 0, 2, [0, 1]),
        (None, 2, 2, [2, 3]),
        ("3,1,0", 1, 1, [1]),
        ("3,1,0", 1, None, [1, 0]),
        ("3,1,0", 3, None, []),
        ("3,1,0", 0, 0, []),
        ("", 0, None, []),
        ("", 0, 0, []),
    ],
)
def test_an_offset_counts_among_the_visible_devices(
    variable: str | None, offset: int, count: int | None, taken: list[int]
) -> None:
    assert visible_devices(variable, FOUR, offset=offset, count=count) == tuple(taken)


@pytest.mark.parametrize(
    ("variable", "offset", "count"),
    [
        (None, 4, 1),
        (None, 5, None),
        (None, 0, 5),
        ("3,1", 1, 2),
        ("3,1", 2, 1),
        ("", 0, 1),
        ("-1", 1, None),
        (None, -1, 1),
        (None, 0, -1),
    ],
)
def test_nothing_past_the_end_is_ever_selected(variable: str | None, offset: int, count: int | None) -> None:
    with pytest.raises(ConfigError):
        visible_devices(variable, FOUR, offset=offset, count=count)


def test_a_machine_without_devices_has_none_to_show() -> None:
    assert visible_devices(None, []) == ()
    assert visible_devices("0", []) == ()
