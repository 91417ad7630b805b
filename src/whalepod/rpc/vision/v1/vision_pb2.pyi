from whalepod.rpc.common.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("ticket", "content_hash", "patches", "patch_rows", "patch_columns")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    PATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    PATCH_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.SignedTicket
    content_hash: bytes
    patches: bytes
    patch_rows: int
    patch_columns: int
    def __init__(self, ticket: _Optional[_Union[_common_pb2.SignedTicket, _Mapping]] = ..., content_hash: _Optional[bytes] = ..., patches: _Optional[bytes] = ..., patch_rows: _Optional[int] = ..., patch_columns: _Optional[int] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("embeddings", "tokens")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    embeddings: bytes
    tokens: int
    def __init__(self, embeddings: _Optional[bytes] = ..., tokens: _Optional[int] = ...) -> None: ...
