from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Signature(_message.Message):
    __slots__ = ("time_unix_ms", "mac")
    TIME_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    time_unix_ms: int
    mac: bytes
    def __init__(self, time_unix_ms: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("signature", "index")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    signature: Signature
    index: int
    def __init__(self, signature: _Optional[_Union[Signature, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("incarnation", "epoch", "running", "members", "place", "leaving")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    running: bool
    members: _containers.RepeatedScalarFieldContainer[int]
    place: ProcessPlace
    leaving: bool
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., running: _Optional[bool] = ..., members: _Optional[_Iterable[int]] = ..., place: _Optional[_Union[ProcessPlace, _Mapping]] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ProcessPlace(_message.Message):
    __slots__ = ("host", "pid", "start_ticks")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TICKS_FIELD_NUMBER: _ClassVar[int]
    host: str
    pid: int
    start_ticks: int
    def __init__(self, host: _Optional[str] = ..., pid: _Optional[int] = ..., start_ticks: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("signature", "index", "incarnation", "epoch", "held")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    signature: Signature
    index: int
    incarnation: int
    epoch: int
    held: _containers.RepeatedCompositeFieldContainer[HeldExperts]
    def __init__(self, signature: _Optional[_Union[Signature, _Mapping]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldExperts, _Mapping]]] = ...) -> None: ...

class HeldExperts(_message.Message):
    __slots__ = ("prefix", "experts")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prefix: _Optional[str] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: Group
    def __init__(self, group: _Optional[_Union[Group, _Mapping]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("epoch", "members", "store_host", "store_port")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    store_host: str
    store_port: int
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("index", "incarnation", "held")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    index: int
    incarnation: int
    held: _containers.RepeatedCompositeFieldContainer[HeldExperts]
    def __init__(self, index: _Optional[int] = ..., incarnation: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldExperts, _Mapping]]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("signature", "epoch", "round")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    signature: Signature
    epoch: int
    round: int
    def __init__(self, signature: _Optional[_Union[Signature, _Mapping]] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoredRequest(_message.Message):
    __slots__ = ("signature", "epoch", "number", "stored")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    signature: Signature
    epoch: int
    number: int
    stored: bool
    def __init__(self, signature: _Optional[_Union[Signature, _Mapping]] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., stored: _Optional[bool] = ...) -> None: ...

class StoredResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
