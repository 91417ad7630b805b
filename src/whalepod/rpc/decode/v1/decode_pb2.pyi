from whalepod.rpc.common.v1 import common_pb2 as _common_pb2
from whalepod.rpc.prefill.v1 import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("start", "ready", "cancel", "more")
    START_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    start: Start
    ready: Ready
    cancel: Cancel
    more: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., more: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.SignedTicket
    def __init__(self, ticket: _Optional[_Union[_common_pb2.SignedTicket, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("request_id", "attempt", "result")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    attempt: int
    result: _prefill_pb2.RunResponse
    def __init__(self, request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., result: _Optional[_Union[_prefill_pb2.RunResponse, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    attempt: int
    def __init__(self, request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("packed_step",)
    PACKED_STEP_FIELD_NUMBER: _ClassVar[int]
    packed_step: bytes
    def __init__(self, packed_step: _Optional[bytes] = ...) -> None: ...
