from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("blocks", "block_bytes", "snapshots", "memory_bytes_used", "memory_bytes_max", "fragmentation", "blocks_evicted", "owners", "images", "image_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    block_bytes: int
    snapshots: int
    memory_bytes_used: int
    memory_bytes_max: int
    fragmentation: float
    blocks_evicted: int
    owners: _containers.RepeatedCompositeFieldContainer[OwnerUsage]
    images: int
    image_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., snapshots: _Optional[int] = ..., memory_bytes_used: _Optional[int] = ..., memory_bytes_max: _Optional[int] = ..., fragmentation: _Optional[float] = ..., blocks_evicted: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[OwnerUsage, _Mapping]]] = ..., images: _Optional[int] = ..., image_bytes: _Optional[int] = ...) -> None: ...

class OwnerUsage(_message.Message):
    __slots__ = ("owner", "bytes")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    owner: int
    bytes: int
    def __init__(self, owner: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("tenant", "namespace", "writer")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: bytes
    writer: int
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[bytes] = ..., writer: _Optional[int] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("keys_removed",)
    KEYS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    keys_removed: int
    def __init__(self, keys_removed: _Optional[int] = ...) -> None: ...
