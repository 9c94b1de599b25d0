"""One training step of nano Ling, as plain PyTorch on the CPU and as a CUDA graph on a GPU.

A step is a forward pass with three draft steps behind it, a backward pass and the optimizer: some ten thousand small
kernels. Launching them one by one would take longer than running them, so on a GPU one graph a row length replays all
(nothing in a step waits for the host), and the functions between the matrix products are compiled, which halves their
memory traffic. Weights can be rounded to their stored form first; gradients go straight through.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from sparkmoe.nano import data, layers
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.model import Ling
from sparkmoe.nano.optim import Optimizer
from sparkmoe.nano.quantize import form, round_weight

DEPTH = 3  # draft steps that are trained
MTP_WEIGHT = 0.15  # of each draft step's loss


@torch.no_grad()
def initialize(model: Ling, seed: int) -> None:
    """Small matrices, smaller ones into the residual stream, wider ones before a limit, so that the limit bites."""
    gen, c = torch.Generator().manual_seed(seed), model.config
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            new = torch.rand(p.shape, generator=gen)
        elif name.endswith("dt_bias"):
            new = torch.rand(p.shape, generator=gen) * 4.0 - 5.0  # slow decay at first
        elif "norm" in name:
            continue
        elif name.endswith("conv1d.weight"):
            new = (torch.rand(p.shape, generator=gen) - 0.5) * 2 * p.shape[-1] ** -0.5
        else:
            leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
            scale = 0.3 * math.sqrt(c.hidden_size) if leaf == "word_embeddings" else 0.5
            if leaf in ("dense", "down_proj"):
                scale /= math.sqrt(2 * c.num_hidden_layers)
            if (
                leaf in ("gate_proj", "up_proj")
                and ".experts." in name
                and c.swiglu_limit(int(name.split(".")[2]), False)
            ):
                scale *= 3.0
            new = torch.randn(p.shape, generator=gen) * (scale / math.sqrt(c.hidden_size))
        p.copy_(new)


class Objective(nn.Module):
    """Weighted cross entropy of the next token, and of the draft steps' tokens, in one module for `functional_call`."""

    def __init__(self, ling: Ling) -> None:
        super().__init__()
        self.ling = ling

    def _loss(self, hidden: Tensor, ids: Tensor, weights: Tensor, shift: int) -> Tensor:
        """The loss where element p predicts the token at p + shift."""
        target, weight = F.pad(ids[:, shift:], (0, shift)), F.pad(weights[:, shift:], (0, shift))
        each = F.cross_entropy(self.ling.lm_head(hidden).float().flatten(0, 1), target.flatten(), reduction="none")
        return (each * weight.flatten()).sum() / weight.sum()

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """ids, weights: [B, T] -> losses [1 + DEPTH], the next token's first."""
        hidden = self.ling.hidden(ids)
        out = [self._loss(hidden, ids, weights, 1)]
        for step, h in enumerate(self.ling.drafts(ids, hidden, DEPTH)):
            out.append(self._loss(h, ids, weights, step + 2))
        return torch.stack(out)


class Trainer:
    """Model, optimizer and the step functions for each row length, with or without rounded weights."""

    def __init__(self, config: LingConfig, seed: int, device: str, compiled: bool = False) -> None:
        self.device = device
        torch._dynamo.config.recompile_limit = 64
        self.hot = {n: torch.compile(f, dynamic=False) for n, f in PLAIN.items()} if compiled else PLAIN
        ling = Ling(config)
        initialize(ling, seed)
        self.objective = Objective(ling).to(device).train()
        self.ling = self.objective.ling
        self.optimizer = Optimizer(self.objective)
        self.names = [n for n, _ in self.objective.named_parameters()]
        self.bias_rate = torch.zeros((), device=device)
        self.metrics = torch.zeros(2 + DEPTH, device=device)
        self.graphs: dict[tuple[int, bool], tuple[Tensor, Tensor, torch.cuda.CUDAGraph]] = {}
        self.pool: Any = None

    def weights(self, rounded: bool) -> dict[str, Tensor]:
        named = dict(zip(self.names, self.optimizer.params, strict=True))
        if not rounded:
            return {n: p.view_as(p) for n, p in named.items()}  # no leaves, as rounded ones: compiled once
        config = self.ling.config
        return {n: round_weight(p, form(n.removeprefix("ling."), config)) for n, p in named.items()}

    def _gradients(self, ids: Tensor, weights: Tensor, rounded: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            losses = torch.func.functional_call(self.objective, self.weights(rounded), (ids.long(), weights.float()))
        total = losses[0] + MTP_WEIGHT * losses[1:].sum()
        return losses.detach(), torch.autograd.grad(total, self.optimizer.params)

    def _step(self, ids: Tensor, weights: Tensor, rounded: bool) -> None:
        losses, grads = self._gradients(ids, weights, rounded)
        self.optimizer.step(grads)
        imbalance = torch.stack([r.balance(self.bias_rate) for r in self.ling.routers()]).mean()
        self.metrics.copy_(torch.cat([losses, imbalance[None]]))

    def step(self, rows: data.Rows, rounded: bool) -> None:
        """One optimizer step; losses go to `metrics` (main, drafts…, max load / mean load)."""
        ids, weights = torch.from_numpy(rows.ids), torch.from_numpy(rows.weights)
        if self.device != "cuda":
            return self._step(ids, weights, rounded)
        use(self.hot)
        key = (ids.shape[1], rounded)
        if key not in self.graphs:
            self.graphs[key] = self._capture(ids, weights, rounded)
        static_ids, static_weights, graph = self.graphs[key]
        static_ids.copy_(ids.pin_memory(), non_blocking=True)
        static_weights.copy_(weights.pin_memory(), non_blocking=True)
        graph.replay()
        return None

    def _capture(self, ids: Tensor, weights: Tensor, rounded: bool) -> tuple[Tensor, Tensor, torch.cuda.CUDAGraph]:
        ids, weights = ids.cuda(), weights.cuda()
        loads = [r.load.clone() for r in self.ling.routers()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _, grads = self._gradients(ids, weights, rounded)  # allocates what libraries allocate at first use
            self.optimizer.warm_up(grads)
            del grads
        torch.cuda.current_stream().wait_stream(stream)
        for router, load in zip(self.ling.routers(), loads, strict=True):
            router.load.copy_(load)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._step(ids, weights, rounded)
        self.pool = graph.pool()
        return ids, weights, graph

    @torch.no_grad()
    def evaluate(self, sets: dict[str, tuple[Tensor, Tensor]], rounded: bool) -> dict[str, float]:
        """For each set the share of problems whose digits are all right, given the true text before each, and the mean
        accept length of three greedy drafts. A digit that opens a line does not count: that one of several wordings was
        drawn cannot be known."""
        out: dict[str, float] = {}
        tok = Tokenizer.from_file(str(data.TOKENIZER))
        digits = torch.tensor([tok.token_to_id(d) for d in "0123456789"], device=self.device)
        opens = torch.tensor([tok.encode("\n").ids[0], tok.token_to_id("<think>")], device=self.device)
        self.objective.eval()
        use(PLAIN)  # other shapes: not worth compiling for
        swapped = {n.removeprefix("ling."): w for n, w in self.weights(rounded).items()}
        for name, (ids, weights) in sets.items():
            ids, weights = ids.to(self.device), weights.to(self.device)
            reply = (weights > data.PROMPT)[:, 1:]
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                guess, drafts = torch.func.functional_call(_Guess(self.ling), _prefix(swapped), (ids,))
            true = ids[:, 1:]
            number = reply & torch.isin(true, digits) & ~torch.isin(ids[:, :-1], opens)
            right = ((guess[:, :-1] == true) | ~number).all(1)
            out[name] = right.float().mean().item()
            length, alive = torch.ones(()), torch.ones_like(reply[:, :-DEPTH]).bool()
            where = reply[:, DEPTH:]
            for s, draft in enumerate(drafts):
                alive = alive & (draft[:, : alive.shape[1]] == guess[:, s + 1 : s + 1 + alive.shape[1]])
                length = length + (alive & where).sum().cpu() / where.sum().cpu()
            out[f"{name} accept"] = length.item()
        self.objective.train()
        return out


HOT = ("kda_mix", "rms_norm", "weighted_swiglu")
PLAIN = {name: getattr(layers, name) for name in HOT}


def use(functions: dict[str, Any]) -> None:
    """Lets the layers call these instead of their plain definitions."""
    for name, function in functions.items():
        setattr(layers, name, function)


class _Guess(nn.Module):
    def __init__(self, ling: Ling) -> None:
        super().__init__()
        self.ling = ling

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, T] -> the most likely next tokens [B, T] and those of each draft step."""
        hidden = self.ling.hidden(ids)
        best = lambda h: self.ling.lm_head(h).argmax(-1)  # noqa: E731
        return best(hidden), [best(h) for h in self.ling.drafts(ids, hidden, DEPTH)]


def _prefix(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"ling.{n}": w for n, w in named.items()}
