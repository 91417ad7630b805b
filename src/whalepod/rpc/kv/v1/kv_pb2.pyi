from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("blocks", "block_bytes", "snapshots", "snapshot_bytes", "memory_bytes_used", "memory_bytes_max")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    block_bytes: int
    snapshots: int
    snapshot_bytes: int
    memory_bytes_used: int
    memory_bytes_max: int
    def __init__(self, blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., snapshots: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., memory_bytes_used: _Optional[int] = ..., memory_bytes_max: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("tenant", "namespace")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: bytes
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("keys_removed",)
    KEYS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    keys_removed: int
    def __init__(self, keys_removed: _Optional[int] = ...) -> None: ...
