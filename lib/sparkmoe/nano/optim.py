"""The optimizer: Muon for matrices, Adam for the rest, without a synchronization, so that a whole step fits a CUDA
graph.

Muon replaces a matrix's momentum by the nearest orthogonal matrix (a few Newton-Schulz iterations), which moves all
directions equally far and learns in about half the steps of Adam at this size. Scaled by 0.2 * sqrt(max(out, in)) its
updates are as large as Adam's, so both share one learning rate. Equal shapes are stacked: a model of 70 matrices needs
eight products, not seventy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """[…, out, in] -> the same with singular values near 1 (0.7…1.2)."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


def is_matrix(name: str) -> bool:
    """Whether Muon moves this parameter: the layers' matrices, but not gates with one row a head, router or
    convolution.
    """
    small = ("gate.weight", "conv1d.weight", "b_proj.weight")
    return ".layers." in name and not name.endswith(small)


class Optimizer:
    """State is FP32. `lr` is a tensor to be filled before a step; weight decay is decoupled and spares vectors."""

    def __init__(self, model: nn.Module, decay: float = 0.05, momentum: float = 0.95) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.params = [p for _, p in named]
        device = self.params[0].device
        self.lr, self.correction = torch.zeros((), device=device), torch.ones((), device=device)
        self.decay, self.momentum = decay, momentum
        groups: dict[tuple[int, ...], list[int]] = {}
        self.adam: list[int] = []
        for i, (name, p) in enumerate(named):
            if p.dim() > 1 and min(p.shape[-2:]) > 8 and is_matrix(name):
                groups.setdefault(tuple(p.shape[-2:]), []).append(i)
            else:
                self.adam.append(i)
        self.muon = list(groups.values())
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(self.params[i]) for i in self.adam]

    def set_lr(self, lr: float, step: int) -> None:
        """Before step number `step` (from 1): the rate, and Adam's bias correction folded into one factor."""
        self.lr.fill_(lr)
        self.correction.fill_(math.sqrt(1 - 0.95**step) / (1 - 0.9**step))

    @torch.no_grad()
    def step(self, grads: tuple[Tensor, ...]) -> None:
        for group in self.muon:
            g, m, p = ([seq[i] for i in group] for seq in (grads, self.m, self.params))
            torch._foreach_lerp_(m, g, 1 - self.momentum)
            nesterov = torch._foreach_lerp(g, m, self.momentum)
            rows = [x.flatten(0, -3) if x.dim() > 2 else x.unsqueeze(0) for x in nesterov]
            update = orthogonalize(torch.cat(rows)) * (0.2 * math.sqrt(max(rows[0].shape[-2:]))) * self.lr
            torch._foreach_mul_(p, 1 - self.decay * self.lr)
            sizes = [len(x) for x in rows]
            for x, u in zip(p, update.split(sizes), strict=True):
                x.sub_(u.view_as(x))
        g, m, p = ([seq[i] for i in self.adam] for seq in (grads, self.m, self.params))
        torch._foreach_lerp_(m, g, 0.1)
        torch._foreach_mul_(self.v, 0.95)
        torch._foreach_addcmul_(self.v, g, g, 0.05)
        denominator = torch._foreach_sqrt(self.v)
        torch._foreach_add_(denominator, 1e-10)
        update_adam = torch._foreach_div(m, denominator)
        torch._foreach_mul_(update_adam, self.lr * self.correction)
        torch._foreach_sub_(p, update_adam)

    def warm_up(self, grads: tuple[Tensor, ...]) -> None:
        """Runs the products once without a change, before a CUDA graph is captured."""
        for group in self.muon:
            g = grads[group[0]]
            orthogonalize(g if g.dim() > 2 else g.unsqueeze(0))

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {"m": self.m, "v": self.v}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        for mine, theirs in ((self.m, state["m"]), (self.v, state["v"])):
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(b)
