"""A recipe says what to switch on; this module alone knows how SGLang wants to be told.

The three levers act on different bytes of a decode step. The MoE backend decides how the routed experts' weights are
read and multiplied, the LM head's format how many bytes the last matrix costs (at batch 1 a sixth of all), and a NEXTN
draft how many tokens share one pass over everything. Each lever is one field here, so that two arms of an experiment
can be told apart by `diff`, and a figure can be filed under the recipe that made it.

`Recipe.command` is the only place that builds a command line. Two rules keep it honest. A recipe that cannot run on a
machine raises `RecipeError` with the reason and the nearest recipe that can; it never drops a lever by itself. And the
fp32 head is asked for only when it is wanted: `--enable-fp32-lm-head` and an FP8 head exclude each other.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sparkmoe.checkpoint import Checkpoint
from sparkmoe.errors import RecipeError
from sparkmoe.machine import Machine

Moe = Literal["auto", "flashinfer_mxfp4", "humming", "marlin", "native"]
Head = Literal["fp32", "bf16", "fp8"]
DraftHead = Literal["shared", "fp8", "weight_only", "unscaled"]
Attention = Literal["auto", "triton", "flashinfer", "fa3"]
MAX_DRAFT_STEPS = 16
# Ours, read by the plugin inside the server: SGLang itself knows neither.
FP8_HEAD_ENV = "SGLANG_ENABLE_FP8_LM_HEAD"
EVIDENCE_ENV = "SPARKMOE_EVIDENCE"
DRAFT_HEAD_ENV = "SPARKMOE_DRAFT_HEAD"


# A prompt's temporaries are megabytes. The allocator would return each to the system and get it back as fresh pages,
# 130,000 page faults for 1,024 tokens, half of the time: let it keep what it has. Weights of 2 MB and more go to huge
# pages (PyTorch asks for them where told so): a step streams through 17,000 small ones, and looks each up.
# (GOMP_SPINCOUNT: an idle thread spins a third of a millisecond, not twenty, before it gives its core to others.)
_CPU_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(512 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
               "THP_MEM_ALLOC_ENABLE": "1"}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """What to execute: the argument vector, and the environment variables to add to the caller's own."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def shell(self) -> str:
        """The same as text for a POSIX shell, one flag a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        head, flags = list(self.argv[:3]), list(self.argv[3:])
        lines.append(shlex.join(head))
        while flags:
            flag = [flags.pop(0)]
            while flags and not flags[0].startswith("--"):
                flag.append(flags.pop(0))
            lines.append("  " + shlex.join(flag))
        return " \\\n".join(lines)


@dataclass(frozen=True)
class Recipe:
    """What to switch on. Sizes in tokens; None leaves a choice to the machine's profile or to SGLang.

    `draft_steps` is K, the tokens drafted per verify step (0: no draft). `draft_head` is the head that the draft scores
    with: the target's, or an FP8 copy of a 16-bit one; "weight_only" and "unscaled" show the two ways in which sharing
    an FP8 head fails. `hot_vocab` is a map made by `sparkmoe hot-vocab`: the draft then scores these tokens alone.
    `draft_model` is the folder of a DSpark draft: a model of its own, which drafts K tokens as one block in place of
    the NEXTN layer and scores them with the target's head.
    `tp` splits every matrix over so many GPUs, the same number on each of `nodes` machines, of which this is number
    `node_rank`; they meet at `dist_init_addr` (host:port on the first).
    `attention` is SGLang's backend; drafts under Triton's read a long context slowly (notebook 05).
    `moe_activation="fp8"` asks Humming for FP8 activations. `context_length` above the model's own is refused.
    `extra_args` and `extra_env` reach the server unchanged, for what has no field.
    """

    name: str
    moe: Moe = "auto"
    moe_activation: Literal["default", "fp8"] = "default"
    head: Head = "fp32"
    draft_steps: int = 0
    draft_head: DraftHead = "shared"
    hot_vocab: str | None = None
    draft_model: str | None = None
    attention: Attention = "auto"
    context_length: int | None = None
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    kv_cache_dtype: str = "auto"
    radix_cache: bool = True
    seed: int = 0
    metrics: bool = False
    tp: int = 1
    nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        choices = (("moe", self.moe, Moe), ("head", self.head, Head), ("draft_head", self.draft_head, DraftHead),
                   ("attention", self.attention, Attention))  # fmt: skip
        for what, value, kind in choices:
            if value not in (known := get_args(kind)):
                raise RecipeError(f"recipe {self.name}: {what}={value!r} is none of {', '.join(known)}")
        if not 0 <= self.draft_steps <= MAX_DRAFT_STEPS:
            raise RecipeError(f"recipe {self.name}: draft_steps={self.draft_steps} is not in 0…{MAX_DRAFT_STEPS}")
        if self.moe_activation == "fp8" and self.moe != "humming":
            raise RecipeError(f"recipe {self.name}: only moe='humming' takes FP8 activations, found moe={self.moe!r}")
        own_head = self.draft_head != "shared" or self.hot_vocab
        if not self.draft_steps and (own_head or self.draft_model):
            raise RecipeError(
                f"recipe {self.name}: draft_head, hot_vocab and draft_model need a draft, found draft_steps=0"
            )
        if self.draft_model and own_head:
            raise RecipeError(f"recipe {self.name}: a DSpark draft scores with the target's head; drop draft_head and "
                              "hot_vocab, or draft_model")  # fmt: skip
        if self.draft_head == "fp8" and self.head == "fp8":
            raise RecipeError(f"recipe {self.name}: with head='fp8' the shared head is FP8 already; drop draft_head")
        if self.draft_head in ("weight_only", "unscaled") and self.head != "fp8":
            raise RecipeError(f"recipe {self.name}: draft_head={self.draft_head!r} only fails with head='fp8'")
        if self.mem_fraction is not None and not 0.05 <= self.mem_fraction <= 0.95:
            raise RecipeError(f"recipe {self.name}: mem_fraction={self.mem_fraction} is not in 0.05…0.95")

        if self.tp < 1 or self.nodes < 1 or self.tp % self.nodes:
            raise RecipeError(f"recipe {self.name}: tp={self.tp} GPUs cannot be shared evenly by {self.nodes} nodes")
        if not 0 <= self.node_rank < self.nodes:
            raise RecipeError(f"recipe {self.name}: node_rank={self.node_rank} is not in 0…{self.nodes - 1}")
        if self.nodes > 1 and not re.fullmatch(r"\S+:\d+", self.dist_init_addr or ""):
            raise RecipeError(f"recipe {self.name}: {self.nodes} nodes need dist_init_addr, host:port of the first one")
        if self.tp > 1 and self.hot_vocab:
            raise RecipeError(f"recipe {self.name}: SGLang has no hot vocabulary with tp={self.tp}; drop one of them")

    @classmethod
    def named(cls, name: str) -> Recipe:
        """A recipe by name; `_k2` behind a drafting one sets K. Raises RecipeError that suggests near names."""
        if name in RECIPES:
            return RECIPES[name]
        stem = re.fullmatch(r"(.+)_k(\d+)", name)
        if stem and stem[1] in RECIPES and RECIPES[stem[1]].draft_steps:
            return RECIPES[stem[1]].with_(name=name, draft_steps=int(stem[2]))
        near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(RECIPES)}"
        raise RecipeError(f"no recipe named {name!r}; {hint}")

    def with_(self, **changes: Any) -> Recipe:
        """A changed copy. Without a new name it is named after the changes, so that two arms never share a label."""
        unknown = set(changes) - {f.name for f in fields(self)}
        if unknown:
            raise RecipeError(f"a recipe has no field {', '.join(sorted(unknown))}")
        if "name" not in changes:
            changed = [f"{key}={value}" for key, value in changes.items() if value != getattr(self, key)]
            changes["name"] = f"{self.name}({','.join(changed)})" if changed else self.name
        return replace(self, **changes)

    def on_nodes(self, tp: int, node: str, meet: str | None) -> Recipe:
        """A copy for `tp` GPUs, on machine `node` ("0/2" is the first of two) of those that meet at `meet`."""
        found = re.fullmatch(r"(\d+)/(\d+)", node)
        if found is None:
            raise RecipeError(f"{node!r} is no machine among several; expected something like 0/2")
        return replace(self, tp=tp, node_rank=int(found[1]), nodes=int(found[2]), dist_init_addr=meet)

    def diff(self, other: Recipe) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, name apart: field → (here, there)."""
        mine, theirs = asdict(self), asdict(other)
        return {k: (mine[k], theirs[k]) for k in mine if k != "name" and mine[k] != theirs[k]}

    def why_not(self, machine: Machine, checkpoint: Checkpoint | None = None) -> str | None:
        """One line that says why this recipe cannot run on a machine (with a model), None if it can."""
        needs = [self.moe, *(["fp8_activations"] if self.moe_activation == "fp8" else [])]
        needs += ["fp8_head"] if self.head == "fp8" else []
        needs += ["dspark"] if self.draft_model else []
        for need in needs:
            if reason := machine.why_not(need):
                return reason
        here = self.tp // self.nodes
        if here > max(1, machine.gpu_count):
            return f"tp={self.tp} on {self.nodes} node(s) needs {here} GPUs each; this machine has {machine.gpu_count}"
        if self.attention != "auto" and machine.profile == "cpu":
            return f"attention={self.attention} needs an NVIDIA GPU; the CPU platform attends by itself"
        if self.tp > 1 and machine.profile == "cpu":
            return f"tp={self.tp} needs NVIDIA GPUs; this machine runs on its CPU"
        if self.hot_vocab and not Path(self.hot_vocab).is_file():
            return f"there is no token map {self.hot_vocab}; make one with `sparkmoe hot-vocab`"
        if checkpoint is None:
            return None
        if self.draft_model and not (Path(self.draft_model) / "config.json").is_file():
            return f"there is no draft in {self.draft_model}: expected a folder with config.json and its weights"
        if self.draft_steps and not self.draft_model and not checkpoint.draft_layers:
            return f"{checkpoint.path.name} has no NEXTN layer (num_nextn_predict_layers is 0), so it cannot draft"
        if self.moe == "flashinfer_mxfp4" and checkpoint.experts != "mxfp4":
            return f"flashinfer_mxfp4 needs MXFP4 experts; those of {checkpoint.path.name} are {checkpoint.experts}"
        native = checkpoint.context_length
        if self.context_length and native and self.context_length > native:
            return f"context_length={self.context_length:,} is beyond the model's own {native:,} tokens"
        return None

    def nearest(self, machine: Machine) -> Recipe:
        """This recipe if the machine can run it, else without the MoE backend that it cannot: a named recipe where one
        has the same fields."""
        if self.why_not(machine) is None:
            return self
        bare = replace(self, moe="auto", moe_activation="default")
        known = next((r for r in RECIPES.values() if not r.diff(bare)), None)
        return known or replace(bare, name=f"{self.name}_without_{self.moe}")

    def require(self, machine: Machine, checkpoint: Checkpoint | None = None) -> None:
        """Raise RecipeError if this recipe cannot run, naming the nearest one that can."""
        reason = self.why_not(machine, checkpoint)
        if reason is None:
            return
        near = self.nearest(machine)
        hint = f"; nearest that runs here: {near.name} (without {self.moe})" if near.diff(self) else ""
        raise RecipeError(f"recipe {self.name} cannot run here: {reason}{hint}")

    def command(
        self,
        machine: Machine,
        *,
        model: Path | str,
        port: int,
        host: str = "127.0.0.1",
        api_key: str | None = None,
        config: Path | None = None,
        evidence: Path | None = None,
    ) -> Command:
        """The command that serves `model`. Raises RecipeError where the recipe cannot run on `machine`.

        `config` is a YAML file with further flags, which keeps the API key out of the process list. `evidence` is where
        the plugin writes what it finds on the loaded model.
        """
        self.require(machine)
        folder = Path(model)
        argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder)]
        argv += ["--served-model-name", folder.name, "--host", host, "--port", str(port)]
        argv += ["--reasoning-parser", "ling3", "--tool-call-parser", "ling3", "--enable-cache-report"]
        argv += ["--random-seed", str(self.seed)]
        concurrency = self.max_running_requests or machine.max_concurrency
        argv += ["--max-running-requests", str(concurrency)]
        env = {"HF_HUB_OFFLINE": "1"}  # the model is a folder: nothing may be looked up elsewhere
        fraction, tokens = self.mem_fraction, self.max_total_tokens
        if machine.profile == "cpu":
            argv += ["--device", "cpu", "--dtype", "float32", "--disable-overlap-schedule", "--sleep-on-idle"]
            env |= {"SGLANG_PLATFORM": "torch_cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
            env |= {"SGLANG_MAMBA_CONV_DTYPE": "float32", **_CPU_MEMORY, "GOMP_SPINCOUNT": "5000"}
            env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "sparkmoe.sglang_plugin.torch_cpu.models"
            fraction, tokens = fraction or 0.3, tokens or 8192
            argv += ["--mamba-radix-cache-strategy", "no_buffer"] if self.radix_cache else ["--disable-radix-cache"]
        else:
            argv += [] if self.radix_cache else ["--disable-radix-cache"]
            argv += ["--cuda-graph-max-bs-decode", str(concurrency)]
        if machine.profile == "spark":
            argv += ["--fp8-gemm-backend", "cutlass"]
            fraction = fraction or 0.68  # at 0.75 and more a GB10 can wedge in its driver
        if fraction is not None:
            argv += ["--mem-fraction-static", str(fraction)]
        if tokens is not None:
            argv += ["--max-total-tokens", str(tokens)]
        if self.context_length is not None:
            argv += ["--context-length", str(self.context_length)]
        if self.kv_cache_dtype != "auto":
            argv += ["--kv-cache-dtype", self.kv_cache_dtype]
        if self.attention != "auto":
            argv += ["--attention-backend", self.attention]
        moe = self.moe_backend(machine)
        if moe is not None:
            argv += ["--moe-runner-backend", moe]
        if self.moe_activation == "fp8":
            env["SGLANG_HUMMING_INPUT_QUANT_CONFIG"] = '{"dtype":"float8e4m3","input_scale_group_size":128}'
        if self.head == "fp32":
            argv.append("--enable-fp32-lm-head")
        elif self.head == "fp8":
            env[FP8_HEAD_ENV] = "1"
        if self.draft_model:
            argv += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", self.draft_model]
            argv += ["--speculative-dspark-block-size", str(self.draft_steps)]
        elif self.draft_steps:
            argv += ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(self.draft_steps)]
            argv += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(self.draft_steps + 1)]
            argv += ["--speculative-moe-runner-backend", moe] if moe is not None else []
            argv += ["--speculative-token-map", str(Path(self.hot_vocab).absolute())] if self.hot_vocab else []
            env |= {DRAFT_HEAD_ENV: self.draft_head} if self.draft_head != "shared" else {}
        argv += ["--enable-metrics"] if self.metrics else []
        argv += ["--tp-size", str(self.tp)] if self.tp > 1 else []
        if self.nodes > 1:
            argv += ["--nnodes", str(self.nodes), "--node-rank", str(self.node_rank)]
            argv += ["--dist-init-addr", str(self.dist_init_addr)]
        argv += self.extra_args
        argv += ["--api-key", api_key] if api_key else []
        argv += ["--config", str(config)] if config else []
        env |= {EVIDENCE_ENV: str(evidence)} if evidence else {}
        return Command(tuple(argv), env | dict(self.extra_env))

    def moe_backend(self, machine: Machine) -> str | None:
        """The value of `--moe-runner-backend` on a machine, None where SGLang's own choice stands."""
        if machine.profile == "cpu" or (self.moe == "auto" and machine.profile != "spark"):
            return None
        return {"auto": "flashinfer_mxfp4", "native": "triton"}.get(self.moe, self.moe)

    def shell(self, machine: Machine, **where: Any) -> str:
        """The command as text that can be pasted into a shell; keywords as in `command`."""
        return self.command(machine, **where).shell()

    def fingerprint(self, machine: Machine, checkpoint: Checkpoint) -> str:
        """12 hex digits, equal for two servers that nobody could tell apart: command, model files, versions."""
        command = self.command(machine, model=checkpoint.path, port=0)
        seen: list[Any] = [
            command.argv,
            sorted(command.env.items()),
            checkpoint.identity(),
            machine.profile,
            machine.versions,
        ]
        chosen = [self.hot_vocab, self.draft_model and f"{self.draft_model}/config.json"]
        seen += [Path(path).stat().st_mtime_ns for path in chosen if path]
        return hashlib.sha256(json.dumps(seen, default=str).encode()).hexdigest()[:12]


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("baseline"),
        Recipe("bf16_head", head="bf16"),
        Recipe("fp8_head", head="fp8"),
        Recipe("humming", moe="humming"),
        Recipe("humming_fp8", moe="humming", head="fp8"),
        Recipe("nextn", draft_steps=3),
        Recipe("bf16_head_nextn", head="bf16", draft_steps=3),
        Recipe("fp8_head_nextn", head="fp8", draft_steps=3),
        Recipe("draft_fp8_head", head="bf16", draft_steps=3, draft_head="fp8"),
        Recipe("all_three", moe="humming", head="fp8", draft_steps=3),
    )
}
