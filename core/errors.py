"""Errors, split by what the caller does next.

ServingError
    RequestError            the caller's fault, never retried
        InvalidFieldError       a field has a bad value; names it
            ContextLengthError
            ImageError              an image that cannot be used; says of which kind the trouble is
        ModelNotFoundError
        AuthenticationError
        ForbiddenError          who asks is known, and may not
    UnavailableError        ours, worth trying elsewhere
        CapacityError           full now
        WorkerLostError         a process or link died
        DrainingError           a process that is about to end: another one takes its place
    DeadlineError           out of time; retrying would not help this caller
    CancelledError          the client is gone
    StaleAttemptError       a newer attempt owns this request; drop the work quietly
    InternalError           our bug, contained to one request
ConfigError                 refused at start: a setting, or two that contradict each other
CheckpointError             refused at load: names the tensors
"""

from __future__ import annotations


class ServingError(Exception):
    """Base of everything a request can end with. `str(error)` is safe to show to the client."""


class RequestError(ServingError):
    """The caller's fault. Never retried."""


class InvalidFieldError(RequestError):
    """`field` of the request has a bad value. The message says what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(InvalidFieldError):
    def __init__(self, *, tokens: int, tokens_max: int, field: str = "prompt") -> None:
        super().__init__(field, f"this model's context is {tokens_max} tokens, but the request needs {tokens}")
        self.tokens = tokens
        self.tokens_max = tokens_max


class ImageError(InvalidFieldError):
    """The message begins with the image's place within `field`. `kind` is the prompt layer's word for what is wrong, as
    in `UnsupportedMediaType`."""

    def __init__(self, field: str, kind: str, message: str, *, place: str = "") -> None:
        super().__init__(field, f"{place}: {message}" if place else message)
        self.kind = kind


class ModelNotFoundError(RequestError):
    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model {model!r} is not served here; try {served!r}")


class AuthenticationError(RequestError):
    """A missing or wrong key, ticket or registration."""


class ForbiddenError(RequestError):
    """A good key that was not made for this."""


class UnavailableError(ServingError):
    """Ours, and worth trying elsewhere."""


class CapacityError(UnavailableError):
    """Full now. `retry_after_s` is an honest guess, or None."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLostError(UnavailableError):
    """The process or link that owned the work is gone."""


class DrainingError(UnavailableError):
    """A process that is about to end takes nothing new, and gives back what it has not finished. Nothing has failed: it
    is being replaced, or others take over."""


class DeadlineError(ServingError):
    """The request's deadline passed."""


class CancelledError(ServingError):
    """The client went away."""


class StaleAttemptError(ServingError):
    """A newer attempt owns this request."""


class InternalError(ServingError):
    """A bug of ours that hit one request. Other requests go on."""


class ConfigError(Exception):
    """Settings that cannot work. Raised before anything starts; names the setting and the fix."""


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded. Names every missing, unexpected or misshapen tensor."""
