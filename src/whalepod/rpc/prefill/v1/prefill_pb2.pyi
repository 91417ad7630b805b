from whalepod.rpc.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_KIND_UNSPECIFIED: _ClassVar[SnapshotKind]
    SNAPSHOT_KIND_FULL: _ClassVar[SnapshotKind]
    SNAPSHOT_KIND_ENCODER: _ClassVar[SnapshotKind]
SNAPSHOT_KIND_UNSPECIFIED: SnapshotKind
SNAPSHOT_KIND_FULL: SnapshotKind
SNAPSHOT_KIND_ENCODER: SnapshotKind

class RunRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.SignedTicket
    def __init__(self, ticket: _Optional[_Union[_common_pb2.SignedTicket, _Mapping]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("snapshot_kind", "boundary_tokens", "first_token", "finish_reason", "cached_tokens", "replayed_tokens", "blocks_stored", "exact", "load", "stored", "matched_stop_id", "direct_address")
    SNAPSHOT_KIND_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    snapshot_kind: SnapshotKind
    boundary_tokens: int
    first_token: _common_pb2.Token
    finish_reason: _common_pb2.FinishReason
    cached_tokens: int
    replayed_tokens: int
    blocks_stored: int
    exact: bool
    load: _common_pb2.Load
    stored: bool
    matched_stop_id: int
    direct_address: str
    def __init__(self, snapshot_kind: _Optional[_Union[SnapshotKind, str]] = ..., boundary_tokens: _Optional[int] = ..., first_token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., blocks_stored: _Optional[int] = ..., exact: _Optional[bool] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., stored: _Optional[bool] = ..., matched_stop_id: _Optional[int] = ..., direct_address: _Optional[str] = ...) -> None: ...
