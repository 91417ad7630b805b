"""Carries a plan's index tensors to the device in one copy, whatever dataclasses they are nested in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")

ALIGNMENT_BYTES = 128
"""Every tensor starts at a multiple of this: kernels read them in whole vectors."""


def on_device(plan: Plan, device: torch.device) -> Plan:
    """The same plan with its tensors on `device`: itself if they are there. A GPU gets them in one copy from pinned
    memory that does not wait."""
    if device.type == "cpu":
        return plan
    staged = stage(plan, pinned=device.type == "cuda")
    return unstage(plan, staged.to(device, non_blocking=True))


def stage(plan: object, *, pinned: bool) -> Tensor:
    """All tensors of a plan, one behind the other [bytes] uint8 on the CPU."""
    tensors = list(_tensors(plan))
    staged = torch.empty(sum(map(_padded_bytes, tensors)), dtype=torch.uint8, pin_memory=pinned)
    start = 0
    for tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if count:
            staged[start : start + count].view(tensor.dtype).copy_(tensor.reshape(-1))
        start += _padded_bytes(tensor)
    return staged


def unstage(plan: Plan, staged: Tensor) -> Plan:
    """The plan with its tensors taken from `staged`, without copying."""
    start = 0

    def taken(tensor: Tensor) -> Tensor:
        nonlocal start
        count = tensor.numel() * tensor.element_size()
        view = staged[start : start + count].view(tensor.dtype).view(tensor.shape)
        start += _padded_bytes(tensor)
        return view

    return _replaced(plan, taken)


def _padded_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _tensors(value: object) -> Iterator[Tensor]:
    """Depth first, in the order of the fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _replaced(value: Any, take: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401  any field of a plan
    if isinstance(value, Tensor):
        return take(value)
    if isinstance(value, Mapping):
        return {name: _replaced(item, take) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _replaced(part, take) for name, part in parts.items()})
    return value
