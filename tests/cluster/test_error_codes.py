"""Every error of the tree crosses a process border as itself."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from whalepod.cluster.error_codes import (
    ATTRIBUTES,
    ERROR_CODES,
    KINDS,
    error_from_record,
    error_from_status,
    kind_of_error,
    record_of_error,
    status_of_error,
)
from whalepod.core import errors
from whalepod.core.errors import ServingError


def whole_tree(root: type[ServingError] = ServingError) -> Iterator[type[ServingError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from whole_tree(child)


def example_of(error_class: type[ServingError]) -> ServingError:
    if error_class is errors.ContextLengthError:
        return errors.ContextLengthError(tokens=12, tokens_max=8, field="messages")
    if error_class is errors.InvalidFieldError:
        return errors.InvalidFieldError("top_p", "top_p must be in (0, 1], not 7 «ä»")
    if error_class is errors.ImageError:
        return errors.ImageError("messages", "EmptyImage", "it is empty", place="messages.0.content[1]")
    if error_class is errors.ModelNotFoundError:
        return errors.ModelNotFoundError("gpt", "whale")
    if error_class is errors.CapacityError:
        return errors.CapacityError("full", retry_after_s=1.5)
    return error_class("it went wrong")


@pytest.mark.parametrize("error_class", list(whole_tree()))
def test_each_class_has_one_kind_and_comes_back_as_itself(error_class: type[ServingError]) -> None:
    sent = example_of(error_class)
    for received in (error_from_record(record_of_error(sent)), error_from_status(*status_of_error(sent))):
        assert type(received) is error_class
        assert str(received) == str(sent)
        assert {name: getattr(received, name, None) for name in ATTRIBUTES} == {
            name: getattr(sent, name, None) for name in ATTRIBUTES
        }


def test_the_table_covers_the_tree_and_nothing_else() -> None:
    assert set(KINDS) == set(whole_tree())
    assert len(KINDS) == len(ERROR_CODES)


def test_every_attribute_of_an_example_is_in_the_table_or_in_the_message() -> None:
    for error_class in whole_tree():
        assert set(vars(example_of(error_class))) <= set(ATTRIBUTES)


def test_metadata_is_ascii_whatever_the_field_is_called() -> None:
    _, _, metadata = status_of_error(errors.InvalidFieldError("füeld\n", "no"))
    assert all(value.isascii() for _, value in metadata)


def test_a_class_outside_the_table_travels_as_its_parent() -> None:
    class TooHotError(errors.UnavailableError):
        pass

    assert kind_of_error(TooHotError("hot")) == "unavailable"


@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.WorkerLostError),
        (grpc.StatusCode.INTERNAL, errors.WorkerLostError),
        (grpc.StatusCode.CANCELLED, errors.WorkerLostError),
        (grpc.StatusCode.UNKNOWN, errors.WorkerLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.RequestError),
    ],
)
def test_a_status_that_our_code_did_not_raise_says_what_to_do_next(
    status: grpc.StatusCode, error_class: type[ServingError]
) -> None:
    assert type(error_from_status(status, "", ())) is error_class


def test_a_long_message_fits_in_the_headers() -> None:
    _, message, _ = status_of_error(errors.RequestError("x" * 100_000))
    assert len(message) < 4_000
