"""Every error of the tree has an HTTP status and OpenAI's form."""

from __future__ import annotations

import json

import pytest

from tests.services.router.router_under_test import RouterUnderTest
from whalepod.core import errors
from whalepod.core.errors import ServingError
from whalepod.services.router.admission import QueueFullError
from whalepod.services.router.http_errors import (
    HTTP_ERRORS,
    BodyTooLargeError,
    BodyTooSlowError,
    HeadersTooLargeError,
    MediaTypeError,
    error_body,
    error_response,
)
from whalepod.services.router.tenant_limits import TenantLimitError

CASES = [
    (errors.RequestError("no"), 400, None),
    (errors.InvalidFieldError("top_p", "no"), 400, "invalid_value"),
    (errors.ContextLengthError(tokens=9, tokens_max=8), 400, "context_length_exceeded"),
    (errors.ImageError("messages", "UnsupportedMediaType", "no"), 400, "unsupported_media_type"),
    (errors.ModelNotFoundError("x", "whale"), 404, "model_not_found"),
    (errors.AuthenticationError("no"), 401, "invalid_api_key"),
    (BodyTooLargeError("no"), 413, "request_too_large"),
    (errors.ForbiddenError("no"), 403, "forbidden"),
    (BodyTooSlowError("x"), 408, "request_timeout"),
    (HeadersTooLargeError("x"), 431, "headers_too_large"),
    (MediaTypeError("no"), 415, "unsupported_media_type"),
    (QueueFullError("no", retry_after_s=7.2), 429, "rate_limit_exceeded"),
    (TenantLimitError("no", retry_after_s=7.2), 429, "rate_limit_exceeded"),
    (errors.CapacityError("no"), 503, "no_capacity"),
    (errors.WorkerLostError("no"), 502, "worker_lost"),
    (errors.DrainingError("no"), 503, "unavailable"),
    (errors.UnavailableError("no"), 503, "unavailable"),
    (errors.DeadlineError("no"), 504, "deadline_exceeded"),
    (errors.CancelledError("no"), 499, "client_closed_request"),
    (errors.StaleAttemptError("no"), 500, "internal_error"),
    (errors.InternalError("no"), 500, "internal_error"),
    (errors.ServingError("no"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), CASES, ids=lambda case: type(case).__name__)
def test_each_error_has_its_status_and_form(error: ServingError, status: int, code: str | None) -> None:
    response = error_response(error)
    assert response.status_code == status
    body = json.loads(bytes(response.body))
    assert body == error_body(error)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["message"] == str(error)
    assert body["error"]["param"] == getattr(error, "field", None)
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_the_cases_cover_the_table_and_the_table_covers_the_tree() -> None:
    assert {type(error) for error, _, _ in CASES} == set(HTTP_ERRORS)
    tree = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ServingError)}
    assert tree <= set(HTTP_ERRORS)


def test_retry_after_is_whole_seconds_and_never_too_soon() -> None:
    assert error_response(QueueFullError("no", retry_after_s=7.2)).headers["retry-after"] == "8"
    assert error_response(errors.UnavailableError("no")).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stop", ["x"] * 17, "stop: list should have at most 16 items"),
        ("stop", ["x", ""], "stop[1]: string should have at least 1 character"),
        ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage: input should be a valid boolean"),
        ("stop_token_ids", [1, "a"], "stop_token_ids[1]: input should be a valid integer"),
    ],
)
async def test_a_refusal_says_what_is_wrong_and_where(
    router: RouterUnderTest, field: str, value: object, said: str
) -> None:
    refused = await router.http.post("/v1/completions", json={"prompt": "a", field: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(said)
