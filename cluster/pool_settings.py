"""Settings of the three pools of ranks: sections of `ClusterConfig`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class PrefillSettings(Section):
    """The prefill pool."""

    replicas: int = Field(default=1, ge=0, description="prefill ranks; 0: every prompt runs on decode ranks")
    role: Literal["full", "encoder"] = Field(
        default="full", description="encoder: half the weights, decode finishes prompts"
    )
    port: Port = Field(default=8100, description="gRPC port of prefill rank 0; rank i listens i above it")
    slots: int = Field(default=4, ge=1, description="prompts that one rank holds at a time")
    blocks: int | None = Field(
        default=None, ge=1, description="KV blocks of one rank; default: as the memory plan says"
    )
    memory_gib: float | None = Field(default=None, gt=0, description="memory for one rank's weights and KV together")
    chunk_tokens: int = Field(default=512, ge=1, description="prompt rows that one step computes at most")
    cpus: float = Field(default=1.0, gt=0, description="CPUs that Ray reserves for one rank")
    gpus: float = Field(
        default=0, ge=0, description="GPUs that Ray reserves for one rank, which then sees no others; 0: it sees all"
    )
    expert_parallel: bool = Field(
        default=False, description="spread the experts over the ranks of the pool; off: every rank holds all"
    )
    redundant_experts: int = Field(
        default=0, ge=0, description="expert slots of a layer beyond one for each expert, over the whole pool"
    )
    context_parallel: int = Field(default=1, ge=1, description="ranks that compute one prompt together, as a group")
    context_parallel_rows_min: int = Field(default=256, ge=1, description="rows of a chunk from which they divide it")


class DecodeSettings(Section):
    """The decode pool."""

    replicas: int = Field(default=1, ge=1, description="decode ranks")
    port: Port = Field(default=8200, description="gRPC port of decode rank 0; rank i listens i above it")
    slots: int = Field(default=16, ge=1, description="requests that one rank runs at a time")
    blocks: int | None = Field(
        default=None, ge=1, description="KV blocks of one rank; default: as the memory plan says"
    )
    memory_gib: float | None = Field(default=None, gt=0, description="memory for one rank's weights and KV together")
    chunk_tokens: int = Field(
        default=128, ge=1, description="prompt rows that one step computes beside decode rows at most"
    )
    cpus: float = Field(default=1.0, gt=0, description="CPUs that Ray reserves for one rank")
    gpus: float = Field(
        default=0, ge=0, description="GPUs that Ray reserves for one rank, which then sees no others; 0: it sees all"
    )
    expert_parallel: bool = Field(
        default=False, description="spread the experts over the ranks of the pool; off: every rank holds all"
    )
    redundant_experts: int = Field(
        default=0, ge=0, description="expert slots of a layer beyond one for each expert, over the whole pool"
    )


class VisionSettings(Section):
    """The vision pool. Without one, the ranks that compute a prompt encode its images themselves."""

    replicas: int = Field(default=0, ge=0, description="vision ranks; 0: prefill and decode ranks encode images")
    port: Port = Field(default=8300, description="gRPC port of vision rank 0; rank i listens i above it")
    cpus: float = Field(default=1.0, gt=0, description="CPUs that Ray reserves for one rank")
    gpus: float = Field(
        default=0, ge=0, description="GPUs that Ray reserves for one rank, which then sees no others; 0: it sees all"
    )
    batch_patches: int = Field(default=16384, ge=1, description="patches of images that are encoded together, at most")
    queue_images: int = Field(
        default=256, ge=1, description="images that one rank is asked for at a time; more are refused"
    )
    cache_rows: int = Field(default=65536, ge=0, description="rows of encoded images that one rank holds")
    store_seconds: float = Field(default=3600.0, gt=0, description="how long encoded images are kept in the store")
    timeout_seconds: float = Field(
        default=30.0, gt=0, description="how long one vision rank may take for an image before another is asked"
    )
