from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_KILL: _ClassVar[FaultKind]
    FAULT_KIND_PAUSE: _ClassVar[FaultKind]
    FAULT_KIND_DELAY: _ClassVar[FaultKind]
    FAULT_KIND_CORRUPT: _ClassVar[FaultKind]
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_KILL: FaultKind
FAULT_KIND_PAUSE: FaultKind
FAULT_KIND_DELAY: FaultKind
FAULT_KIND_CORRUPT: FaultKind

class InjectRequest(_message.Message):
    __slots__ = ("order", "mac")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    order: bytes
    mac: bytes
    def __init__(self, order: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class FaultOrder(_message.Message):
    __slots__ = ("rank_id", "kind", "duration_ms", "delay_ms", "time_unix_ms")
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    rank_id: str
    kind: FaultKind
    duration_ms: int
    delay_ms: int
    time_unix_ms: int
    def __init__(self, rank_id: _Optional[str] = ..., kind: _Optional[_Union[FaultKind, str]] = ..., duration_ms: _Optional[int] = ..., delay_ms: _Optional[int] = ..., time_unix_ms: _Optional[int] = ...) -> None: ...

class InjectResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
