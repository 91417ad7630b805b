from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("order", "mac")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    order: bytes
    mac: bytes
    def __init__(self, order: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class EncodeOrder(_message.Message):
    __slots__ = ("model", "namespace", "width", "height", "data", "expires_unix_ms", "wants_rows", "traceparent", "salt", "owner")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WANTS_ROWS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: bytes
    width: int
    height: int
    data: bytes
    expires_unix_ms: int
    wants_rows: bool
    traceparent: str
    salt: bytes
    owner: int
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[bytes] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., data: _Optional[bytes] = ..., expires_unix_ms: _Optional[int] = ..., wants_rows: _Optional[bool] = ..., traceparent: _Optional[str] = ..., salt: _Optional[bytes] = ..., owner: _Optional[int] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("rows", "tokens", "encoded")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    tokens: int
    encoded: bool
    def __init__(self, rows: _Optional[bytes] = ..., tokens: _Optional[int] = ..., encoded: _Optional[bool] = ...) -> None: ...
