"""Muon for matrices between rows, Adam for everything else.

Muon (Jordan et al., 2024) makes the momentum of a matrix's gradient nearly orthogonal, so that every direction learns
at the same rate. Its update is scaled to the size of Adam's (Liu et al., 2025), so that one learning rate serves both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MUON = (
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "attn.compressor.wkv.weight",
    "attn.compressor.wgate.weight",
    "engram.wkv.weight",
    "ffn.w1",
    "ffn.w2",
    "ffn.w3",
    "main_proj.weight",
)
RATES = {"engram.embed.weight": 3.0, "attn_sink": 3.0, "hc_": 1.0}
"""Adam's learning rate times this, for names that contain the key."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
UPDATE_SIZE = 0.2
"""Root mean square of an update with learning rate 1, about Adam's."""


@dataclass(frozen=True, slots=True)
class Rates:
    muon: float
    adam: float
    weight_decay: float
    """Of Muon's matrices."""


class Optimiser:
    def __init__(self, parameters: Mapping[str, Tensor], rates: Rates, *, momentum: float = 0.95) -> None:
        """`parameters` are leaves that require gradients."""
        self.rates, self.momentum = rates, momentum
        self.parameters = dict(parameters)
        self.matrices: dict[tuple[int, ...], list[str]] = defaultdict(list)
        groups: dict[float, list[Tensor]] = defaultdict(list)
        for name, parameter in parameters.items():
            if name.endswith(MUON):
                self.matrices[tuple(parameter.shape[-2:])].append(name)
            else:
                groups[next((rate for key, rate in RATES.items() if key in name), 1.0)].append(parameter)
        self.factors = list(groups)
        self.momenta = {name: torch.zeros_like(parameters[name]) for names in self.matrices.values() for name in names}
        cuda = any(parameter.is_cuda for parameter in parameters.values())
        self.adam = torch.optim.AdamW(
            [{"params": group} for group in groups.values()],
            lr=rates.adam,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=cuda,
        )

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, norm: float) -> Tensor:
        """Shortens the gradient to `norm`; -> its length before."""
        return torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), norm)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with all learning rates times `scale`."""
        for group, factor in zip(self.adam.param_groups, self.factors, strict=True):
            group["lr"] = self.rates.adam * factor * scale
        self.adam.step()
        for names in self.matrices.values():
            self._step_matrices([name for name in names if self.parameters[name].grad is not None], scale)

    def _step_matrices(self, names: list[str], scale: float) -> None:
        if not names:
            return
        parameters = [self.parameters[name] for name in names]
        ahead: list[Tensor] = []
        for name, parameter in zip(names, parameters, strict=True):
            assert parameter.grad is not None
            self.momenta[name].lerp_(parameter.grad, 1 - self.momentum)
            ahead.append(parameter.grad.lerp(self.momenta[name], self.momentum))
        stacked = torch.cat([update.reshape(-1, *update.shape[-2:]) for update in ahead])
        rows, columns = stacked.shape[1:]
        updates = orthogonal(stacked) * (UPDATE_SIZE * max(rows, columns) ** 0.5)
        counts = [parameter.numel() // (rows * columns) for parameter in parameters]
        rate = self.rates.muon * scale
        for parameter, update in zip(parameters, updates.split(counts), strict=True):
            parameter.mul_(1 - rate * self.rates.weight_decay)
            parameter.sub_(update.view_as(parameter), alpha=rate)

    def state(self) -> dict[str, Tensor]:
        """Everything that `load` needs to go on, by name."""
        found = {f"momentum.{name}": tensor for name, tensor in self.momenta.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                found[f"adam.{key}.{name}"] = value
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, momentum in self.momenta.items():
            momentum.copy_(state[f"momentum.{name}"])
        for name, parameter in self.parameters.items():
            if name in self.momenta or f"adam.step.{name}" not in state:
                continue
            self.adam.state[parameter] = {
                key: state[f"adam.{key}.{name}"]
                .to(parameter.device, torch.float32, copy=True)
                .reshape(parameter.shape if key != "step" else ())
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def orthogonal(matrices: Tensor, *, steps: int = 5) -> Tensor:
    """matrices [count, rows, columns] -> about the nearest matrices whose singular values are 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
    for _ in range(steps):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.transpose(1, 2)).to(matrices.dtype)


def rate_scale(progress: float, *, warm_up: float, decay: float) -> float:
    """The learning rates' share at `progress` (0 to 1): up linearly, flat, in the last `decay` down to 0 linearly."""
    return max(0.0, min(1.0, (progress + 1e-4) / warm_up, (1 - progress) / decay))
