"""What a ticket must pass before a rank works for it."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import (
    AuthenticationError,
    DeadlineError,
    DrainingError,
    InvalidFieldError,
    ModelNotFoundError,
)
from whalepod.core.ids import RequestId
from whalepod.engine.interface import EngineRequest, Fidelity, Work
from whalepod.rpc.common.v1 import common_pb2

from .attempt_fence import AttemptFence
from .tickets import CLOCK_SKEW_MS, engine_request_from_ticket, verify_ticket_or_raise


class TicketGate:
    """The gate of one rank. Checks signature and age first: nothing a stranger sends changes any state here."""

    def __init__(
        self,
        *,
        rank_id: str,
        work: Work,
        model_name: str,
        namespace: bytes,
        fidelities: tuple[Fidelity, ...],
        secret: ClusterSecret,
        clock: Clock,
    ) -> None:
        """`work` says which rank of the ticket this one must be: PREFILL its prefill rank, GENERATE its decode rank."""
        self._rank_id = rank_id
        self._work = work
        self._model_name = model_name
        self._namespace = namespace
        self._fidelities = fidelities
        self._secret = secret
        self._clock = clock
        self._fence = AttemptFence(since_unix_ms=clock.unix_ms() - CLOCK_SKEW_MS)
        self.closed = False
        """Set to refuse every ticket: the rank is leaving."""

    def admit_or_raise(self, signed: common_pb2.SignedTicket) -> EngineRequest:
        """What to do for a ticket that passes.

        Raises AuthenticationError (signature, age, another rank's), ModelNotFoundError, InvalidFieldError,
        DeadlineError, StaleAttemptError, DrainingError when the gate is closed, and UnavailableError if the ticket is
        so old that it may have been used before this rank was started.
        """
        try:
            ticket = verify_ticket_or_raise(signed, self._secret, rank_id=self._rank_id, clock=self._clock)
        except DecodeError:
            raise AuthenticationError("the ticket cannot be parsed") from None
        wanted = ticket.prefill_rank if self._work is Work.PREFILL else ticket.decode_rank
        if wanted != self._rank_id:
            raise AuthenticationError(f"the ticket names {wanted!r} for this work, not {self._rank_id}")
        if ticket.model != self._model_name:
            raise ModelNotFoundError(ticket.model, self._model_name)
        request = engine_request_from_ticket(
            ticket,
            namespace=self._namespace,
            work=self._work,
            await_handoff=self._work is Work.GENERATE and bool(ticket.prefill_rank),
            clock=self._clock,
        )
        if request.fidelity not in self._fidelities:
            raise InvalidFieldError("fidelity", f"fidelity {request.fidelity.value} is not allowed on this cluster")
        if request.deadline.expired:
            raise DeadlineError("the request's deadline passed before it reached a rank")
        if self.closed:
            raise DrainingError(f"{self._rank_id} is draining")
        self._fence.admit_or_raise(request.request_id, request.attempt, signed_unix_ms=ticket.signed_unix_ms)
        return request


def claimed_identity(signed: common_pb2.SignedTicket) -> tuple[RequestId, int] | None:
    """The request id and attempt that a ticket claims, verified or not: where to send its refusal. None: unreadable."""
    try:
        ticket = common_pb2.Ticket.FromString(signed.ticket)
    except DecodeError:
        return None
    return RequestId(ticket.request_id), ticket.attempt
