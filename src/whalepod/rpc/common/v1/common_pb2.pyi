from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Fidelity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIDELITY_UNSPECIFIED: _ClassVar[Fidelity]
    FIDELITY_FAST: _ClassVar[Fidelity]
    FIDELITY_EXACT: _ClassVar[Fidelity]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL_FULL: _ClassVar[Role]
    ROLE_PREFILL_ENCODER: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_VISION: _ClassVar[Role]
    ROLE_PREFILL_MEMBER: _ClassVar[Role]
FIDELITY_UNSPECIFIED: Fidelity
FIDELITY_FAST: Fidelity
FIDELITY_EXACT: Fidelity
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL_FULL: Role
ROLE_PREFILL_ENCODER: Role
ROLE_DECODE: Role
ROLE_VISION: Role
ROLE_PREFILL_MEMBER: Role

class Grammar(_message.Message):
    __slots__ = ("kind", "source", "starts_after")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STARTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    starts_after: int
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ..., starts_after: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "grammar", "prompt_logprobs", "allowed_token_ids", "bad_words", "bad_word_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    grammar: Grammar
    prompt_logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_word_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_word_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("start", "tokens", "width", "height", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: int
    width: int
    height: int
    data: bytes
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("request_id", "attempt", "model", "tenant", "salt", "fidelity", "prompt_ids", "block_hashes", "sampling", "deadline_unix_ms", "prefill_rank", "decode_rank", "expires_unix_ms", "stored_tokens_hint", "traceparent", "resumed_ids", "priority", "branch", "branch_of", "images", "vision_ranks", "signed_unix_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    FIDELITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKENS_HINT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    BRANCH_OF_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    VISION_RANKS_FIELD_NUMBER: _ClassVar[int]
    SIGNED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    attempt: int
    model: str
    tenant: str
    salt: bytes
    fidelity: Fidelity
    prompt_ids: bytes
    block_hashes: bytes
    sampling: SamplingParams
    deadline_unix_ms: int
    prefill_rank: str
    decode_rank: str
    expires_unix_ms: int
    stored_tokens_hint: int
    traceparent: str
    resumed_ids: bytes
    priority: int
    branch: int
    branch_of: bytes
    images: _containers.RepeatedCompositeFieldContainer[Image]
    vision_ranks: _containers.RepeatedScalarFieldContainer[str]
    signed_unix_ms: int
    def __init__(self, request_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., salt: _Optional[bytes] = ..., fidelity: _Optional[_Union[Fidelity, str]] = ..., prompt_ids: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., deadline_unix_ms: _Optional[int] = ..., prefill_rank: _Optional[str] = ..., decode_rank: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ..., stored_tokens_hint: _Optional[int] = ..., traceparent: _Optional[str] = ..., resumed_ids: _Optional[bytes] = ..., priority: _Optional[int] = ..., branch: _Optional[int] = ..., branch_of: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., vision_ranks: _Optional[_Iterable[str]] = ..., signed_unix_ms: _Optional[int] = ...) -> None: ...

class SignedTicket(_message.Message):
    __slots__ = ("ticket", "mac")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    mac: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "blocks_free", "blocks_total", "prefill_tokens_queued", "slots_total")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    prefill_tokens_queued: int
    slots_total: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_total: _Optional[int] = ..., prefill_tokens_queued: _Optional[int] = ..., slots_total: _Optional[int] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("rank_id", "role", "pool", "address", "incarnation", "model", "namespace", "layout", "context_tokens_max", "fidelities", "version", "time_unix_ms", "load", "draining", "reads_batches", "speaks_tls")
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    FIDELITIES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    READS_BATCHES_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_TLS_FIELD_NUMBER: _ClassVar[int]
    rank_id: str
    role: Role
    pool: str
    address: str
    incarnation: int
    model: str
    namespace: bytes
    layout: str
    context_tokens_max: int
    fidelities: _containers.RepeatedScalarFieldContainer[Fidelity]
    version: str
    time_unix_ms: int
    load: Load
    draining: bool
    reads_batches: bool
    speaks_tls: bool
    def __init__(self, rank_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., pool: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., model: _Optional[str] = ..., namespace: _Optional[bytes] = ..., layout: _Optional[str] = ..., context_tokens_max: _Optional[int] = ..., fidelities: _Optional[_Iterable[_Union[Fidelity, str]]] = ..., version: _Optional[str] = ..., time_unix_ms: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[bool] = ..., reads_batches: _Optional[bool] = ..., speaks_tls: _Optional[bool] = ...) -> None: ...

class SignedRegistration(_message.Message):
    __slots__ = ("registration", "mac")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    registration: bytes
    mac: bytes
    def __init__(self, registration: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprob", "top_ids", "top_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...
