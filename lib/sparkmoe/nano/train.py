"""Trains nano Ling: `python -m sparkmoe.nano.train OUT`. About a quarter of an hour on one H200; a day on a laptop's
CPU.

What makes a miniature worth having is that every lever of the cookbook acts on it as on the real model. So it is
trained with what the real one has: SwiGLU limits in force on the last layers (a backend that drops them computes
another function), a routing bias that keeps all experts busy without an auxiliary loss, an MTP layer trained on its
own output over three draft steps (trained on the first alone, its second and third guess would be poor), and, for the
last part, weights rounded to MXFP4 and FP8 in the forward pass, so that the quantized checkpoint is the model that was
trained.

A run stops after `--minutes`, saves everything, and goes on where it stopped; the result depends on the seed and the
machine alone.
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
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from sparkmoe.nano import data, problems, tokenizer
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.model import FP32_NAMES, tensors
from sparkmoe.nano.random_checkpoint import BASE
from sparkmoe.nano.trainer import Trainer

CONFIG: dict[str, Any] = BASE | {
    "vocab_size": data.VOCABULARY,
    "pad_token_id": 2036,
    "eos_token_id": 2037,
    "expert_swiglu_limit_list": [0.0] * 8 + [1.0] * 4,
    "share_expert_swiglu_limit_list": [0.0] * 8 + [2.0] * 4,
}


def held_out(count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Problems of the three test splits as rows of 256 tokens."""
    tok, out = Tokenizer.from_file(str(data.TOKENIZER)), {}
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
    batches = data.Batches(data.TOKENIZER, args.seed, args.tokens, args.workers, stream)
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
