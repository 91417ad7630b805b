"""What a log line carries, for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from whalepod.core.logs import LEVELS, configure_logging


@pytest.fixture(autouse=True)
def _root_logger_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(*, as_json: bool, level: str = "info", fail: bool = False) -> str:
    stream = io.StringIO()
    configure_logging(level=level, as_json=as_json, stream=stream)
    log = logging.getLogger("whalepod.test")
    log.debug("too quiet")
    fields = {"request_id": b"\x01\xff", "attempt": 2, "role": None, "path": ValueError("odd")}
    try:
        if fail:
            raise RuntimeError("broken")
        log.info("handed %s", "off", extra=fields)
    except RuntimeError:
        log.exception("failed", extra=fields)
    return stream.getvalue()


def test_a_machine_reads_one_object_a_line_with_the_fields_beside_the_message() -> None:
    (line,) = logged(as_json=True).splitlines()
    record = json.loads(line)
    assert record.pop("time") > 1_700_000_000
    assert record == {
        "level": "info",
        "logger": "whalepod.test",
        "message": "handed off",
        "request_id": "01ff",
        "attempt": 2,
        "role": None,
        "path": "odd",
    }


def test_an_exception_stays_on_the_one_line_that_a_machine_reads() -> None:
    (line,) = logged(as_json=True, fail=True).splitlines()
    assert "RuntimeError: broken" in json.loads(line)["exception"]


def test_a_person_reads_the_fields_behind_the_message_and_the_traceback_below() -> None:
    first, *rest = logged(as_json=False, fail=True).splitlines()
    assert first.endswith("whalepod.test: failed request_id=01ff attempt=2 role=None path=odd")
    assert rest[-1] == "RuntimeError: broken"


def test_a_field_cannot_replace_the_message_or_the_level() -> None:
    stream = io.StringIO()
    configure_logging(as_json=True, stream=stream)
    logging.getLogger("whalepod.test").info("true", extra={"level": "false", "logger": "false", "time": 0})
    record = json.loads(stream.getvalue())
    assert (record["level"], record["logger"], record["message"]) == ("info", "whalepod.test", "true")


def test_levels_are_the_ones_that_the_flag_offers_and_no_others() -> None:
    assert "too quiet" in logged(as_json=False, level="debug")
    for level in LEVELS:
        configure_logging(level=level, stream=io.StringIO())
    with pytest.raises(ValueError, match="loud"):
        configure_logging(level="loud")
