"""Trains nano Ling: `python -m sparkmoe.nano.train OUT`. About a quarter of an hour on one H200; a day on a laptop's
CPU.

What makes a miniature worth having is that every lever of the cookbook acts on it as on the real model. So it is
trained with what the real one has: SwiGLU limits in force on the last layers (a backend that drops them computes
another function), a routing bias that keeps all experts busy without an auxiliary loss, an MTP layer trained on its
own output over three draft steps (trained on the first alone, its second and third guess would be poor), and, for the
last part, weights rounded to MXFP4 and FP8 in the forward pass, so that the quantized checkpoint is the model that was
trained.

On a GPU one CUDA graph a row length holds the whole step: forward, backward and optimizer are some ten thousand small
kernels, and launching them one by one would take longer than running them. A run stops after `--minutes`, saves
everything, and goes on where it stopped; the result depends on the seed and the machine alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from sparkmoe.nano import data, model, problems, tokenizer
from sparkmoe.nano.model import FP32_NAMES, Ling, LingConfig, tensors
from sparkmoe.nano.optim import Optimizer
from sparkmoe.nano.quantize import form, round_weight
from sparkmoe.nano.random_checkpoint import BASE

CONFIG: dict[str, Any] = BASE | {
    "vocab_size": data.VOCABULARY,
    "pad_token_id": 2036,
    "eos_token_id": 2037,
    "expert_swiglu_limit_list": [0.0] * 8 + [1.0] * 4,
    "share_expert_swiglu_limit_list": [0.0] * 8 + [2.0] * 4,
}
DEPTH = 3  # draft steps that are trained
MTP_WEIGHT = 0.15  # of each draft step's loss
TOKENIZER = Path(__file__).parent / "bundle" / "fp4" / "tokenizer.json"


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
        tok = Tokenizer.from_file(str(TOKENIZER))
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
PLAIN = {name: getattr(model, name) for name in HOT}


def use(functions: dict[str, Any]) -> None:
    """Lets the model's modules call these instead of their plain definitions."""
    for name, function in functions.items():
        setattr(model, name, function)


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


def held_out(count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Problems of the three test splits as rows of 256 tokens."""
    tok, out = Tokenizer.from_file(str(TOKENIZER)), {}
    for name in problems.SPLITS:
        ids, weights = torch.zeros(count, 256, dtype=torch.long), torch.zeros(count, 256)
        for i, p in enumerate(problems.split(name, count, seed=1)):
            ask = tok.encode(tokenizer.prompt(p.question)).ids
            reply = tok.encode(f"{p.reasoning}</think>{p.reply}<|role_end|>").ids
            row = (ask + reply)[:256]
            ids[i, : len(row)] = torch.tensor(row)
            weights[i, len(ask) : len(row)] = data.REPLY
        out[name] = (ids, weights)
    return out


def deliver(trainer: Trainer, folder: Path, rounded: bool, part_bytes: int = 15_000_000) -> list[Path]:
    """The weights as BF16 parts; rounded ones are exact in BF16, so quantizing them again changes nothing."""
    named = trainer.weights(rounded)
    with torch.no_grad():
        kept = {n: p.detach().clone() for n, p in zip(trainer.names, trainer.optimizer.params, strict=True)}
        for n, p in zip(trainer.names, trainer.optimizer.params, strict=True):
            p.copy_(named[n])
        flat = {
            n: t.to(torch.float32 if n.endswith(FP32_NAMES) else torch.bfloat16).cpu().contiguous()
            for n, t in tensors(trainer.ling).items()
        }
        for n, p in zip(trainer.names, trainer.optimizer.params, strict=True):
            p.copy_(kept[n])
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for n, t in flat.items():
        if size + t.nbytes > part_bytes:
            parts.append({})
            size = 0
        parts[-1][n] = t
        size += t.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"weights-{i}.safetensors" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        save_file(part, path, metadata={"format": "pt"})
    return paths


def learning_rate(step: int, steps: int, peak: float, warmup: int, decay_from: float) -> float:
    """Linear warm-up, constant, then linear to zero: before the decay, a run need not know how long it will be."""
    return peak * min(1.0, step / warmup, (steps - step + 1) / (steps * (1 - decay_from)))


def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains until the steps or the minutes are used up; all that a later call needs to go on is in `args.out`."""
    began = time.monotonic()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    config = LingConfig.from_dict(CONFIG | json.loads(args.config))
    trainer = Trainer(config, args.seed, device, device == "cuda" and not args.no_compile)
    saved = args.out / "state.pt"
    step, curves, stream = 0, [], None
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=False)
        trainer.ling.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        step, curves, stream = state["step"], state["curves"], state["stream"]
    batches = data.Batches(TOKENIZER, args.seed, args.tokens, args.workers, stream)
    sets = held_out(args.held_out)
    say(f"{sum(p.numel() for p in trainer.optimizer.params) / 1e6:.1f} M parameters on {device}, from step {step}")

    def save() -> None:
        state = {
            "model": trainer.ling.state_dict(), "optimizer": trainer.optimizer.state_dict(), "step": step,
            "curves": curves, "stream": batches.state,
        }  # fmt: skip
        torch.save(state, saved.with_suffix(".part"))
        os.replace(saved.with_suffix(".part"), saved)
        (args.out / "curves.json").write_text(json.dumps(curves))

    rounded = False
    while step < min(args.steps, args.stop) and time.monotonic() - began < 60 * args.minutes:
        step += 1
        rounded = step > args.decay_from * args.steps
        rate = learning_rate(step, args.steps, args.lr, args.warmup, args.decay_from)
        trainer.optimizer.set_lr(rate, step)
        trainer.bias_rate.fill_(0.0 if step > 0.9 * args.steps else 1e-3)
        trainer.step(next(batches), rounded)
        if step % args.log_every == 0:
            values = trainer.metrics.tolist()
            if not all(math.isfinite(x) for x in values):
                raise FloatingPointError(f"step {step}: the loss is {values}; the last good state is in {saved}")
            point: dict[str, float] = {"step": step, "minutes": (time.monotonic() - began) / 60, "loss": values[0]}
            point |= {f"draft {d + 1} loss": x for d, x in enumerate(values[1:-1])}
            point["imbalance"] = values[-1]
            if step % (args.log_every * 5) == 0:
                point |= trainer.evaluate(sets, rounded)
            curves.append(point)
            say(" ".join(f"{k} {v:.4g}" for k, v in point.items()))
        if step % args.save_every == 0:
            save()
    save()
    batches.close()
    parts = deliver(trainer, args.deliver or args.out, rounded)
    say(f"step {step} of {args.steps}; wrote {', '.join(p.name for p in parts)}")
    return {"step": step, "steps": args.steps, "last": curves[-1] if curves else {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for state, curves and weights; a run found there is continued")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--stop", type=int, default=2**31, help="stop and save after this step")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop and save after this time")
    parser.add_argument("--tokens", type=int, default=24576, help="a step")
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument(
        "--decay-from",
        type=float,
        default=0.6,
        help="part of the run before the rate falls to 0 and weights are rounded",
    )
    parser.add_argument("--no-compile", action="store_true", help="on a GPU: leave the hot functions to plain PyTorch")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--held-out", type=int, default=512, help="problems a test split during training")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--deliver", type=Path, help="another folder for the weights")
    parser.add_argument("--config", default="{}", help="JSON that replaces config keys, for a smaller trial")
    args = parser.parse_args()
    result = run(args, lambda line: print(line, flush=True))  # noqa: T201
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
