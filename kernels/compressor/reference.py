"""Per-channel softmax pooling, spelled out in steps whose order does not depend on the number of groups."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_groups(values: Tensor, scores: Tensor) -> Tensor:
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    return (weights * values).sum(dim=1) / weights.sum(dim=1)
