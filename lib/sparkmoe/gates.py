"""What is checked before anything is loaded.

Loading takes seconds on the miniature and six minutes for 66 GB, and what is found late costs those minutes again; on a
machine whose GPU shares its memory with everything else, too large a load costs a power cycle. Memory, port and
environment can be judged in milliseconds, so they are, and a refusal shows its sum.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from sparkmoe.checkpoint import Checkpoint
from sparkmoe.errors import MachineError
from sparkmoe.hot_vocab import draft_copy_bytes, load
from sparkmoe.machine import GIB, Machine, available_bytes
from sparkmoe.precompile import build_environment
from sparkmoe.processes import Record
from sparkmoe.recipe import Recipe
from sparkmoe.shapes import describe

logger = logging.getLogger(__name__)
# What a server costs beside its weights and pools: interpreters, PyTorch, CUDA context, graphs.
_OVERHEAD_BYTES = {"spark": 8 * GIB, "hopper": 10 * GIB, "cpu": int(3.2 * GIB)}
FLOOR_BYTES = {"spark": 4 * GIB, "hopper": 2 * GIB, "cpu": GIB // 4}
# On a GB10: what SGLang may take of the pool by default, and from where on owners had to pull the plug.
SAFE_FRACTION, WEDGE_FRACTION = 0.68, 0.75


def server_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without `SGLANG_*` and our own: what a shell holds must not change a measured server."""
    ours = {name for name in inherited if name.startswith("SPARKMOE_") and name != "SPARKMOE_HOME"}
    dropped = sorted(ours | {name for name in inherited if name.startswith(("SGLANG_", "SGL_"))})
    if dropped:
        logger.info("not passed to the server: %s (use Recipe.extra_env)", ", ".join(dropped))
    kept = {name: value for name, value in inherited.items() if name not in dropped}
    # Byte code of SGLang and PyTorch is worth 20 s a start; a shell that forbids writing it should not cost that.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    if any(name.lower() in ("http_proxy", "all_proxy") for name in kept):
        # SGLang's own warm-up request goes to 127.0.0.1, and through the proxy unless told otherwise.
        direct = ",".join(filter(None, (kept.get("NO_PROXY") or kept.get("no_proxy"), "127.0.0.1", "localhost")))
        kept |= {"NO_PROXY": direct, "no_proxy": direct}
    # Kernels that are built while serving are built by the lock's ninja, whether or not a shell has activated it.
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    return kept | {"PYTHONUNBUFFERED": "1"} | build_environment()


def memory_need(recipe: Recipe, machine: Machine, seen: Checkpoint) -> dict[str, int]:
    """Bytes of host memory that a start needs, by purpose; the sum is compared with MemAvailable.

    On unified memory SGLang takes its fraction of what is available when it starts, for weights and caches: so much
    must be available that the fraction holds the weights and a tenth of the caches, and the rest everything else. A
    discrete GPU holds both, and the host only what streams through it; on a CPU the weights are held in float32.
    """
    parts = {"server processes": _OVERHEAD_BYTES[machine.profile], "floor": FLOOR_BYTES[machine.profile]}
    if machine.profile == "cpu":
        floats = sum(size for dtype, size in seen.bytes_by_dtype.items() if dtype in ("BF16", "F16"))
        return {"weights in float32": seen.weight_bytes + floats} | parts
    if not machine.unified_memory:
        return parts
    if own := _draft_head_bytes(recipe, seen):
        parts["the draft's own head"] = own
    need = pool_need(recipe, machine, seen)
    pool = {"weights": need.pop("weights"), "a tenth of the KV cache and states": sum(need.values()) // 10}
    fraction = recipe.mem_fraction or SAFE_FRACTION
    left = math.ceil(sum(pool.values()) * (1 - fraction) / fraction) - sum(parts.values())
    return pool | parts | ({f"left alone by mem_fraction {fraction}": left} if left > 0 else {})


def _draft_head_bytes(recipe: Recipe, seen: Checkpoint) -> int:
    """What the draft's own head takes beside SGLang's pool, which is sized before it is made."""
    hot = len(load(recipe.hot_vocab)) if recipe.hot_vocab else None
    sizes = {"vocabulary": int(seen.config["vocab_size"]), "hidden": int(seen.config["hidden_size"])}
    return draft_copy_bytes(**sizes, head=recipe.head, draft_head=recipe.draft_head, hot=hot)


def pool_need(recipe: Recipe, machine: Machine, seen: Checkpoint) -> dict[str, int]:
    """Bytes of SGLang's static pool on one GPU, by purpose: the weights, and caches that let every admitted request
    grow to the whole context. A draft keeps a recurrent state for each token of a verify step besides the request's
    own; of a DSpark draft the weights are counted, not its own small cache. Tensor parallelism splits weights and
    states; the latent KV cache of MLA is whole on every GPU."""
    shape, _ = describe(seen.config)
    requests = recipe.max_running_requests or machine.max_concurrency
    tokens = recipe.max_total_tokens or requests * (recipe.context_length or seen.context_length or 32_768)
    kinds = shape.kinds if recipe.draft_steps else shape.kinds[: shape.layers]
    width = 1 if recipe.kv_cache_dtype.startswith("fp8") else 2
    files = Path(recipe.draft_model).glob("*.safetensors") if recipe.draft_model else ()
    drafter = sum(file.stat().st_size for file in files)
    states = requests * (recipe.draft_steps + 2 if recipe.draft_steps else 1)
    return {
        "weights": (seen.weight_bytes + drafter) // recipe.tp,
        "KV cache": tokens * width * shape.cache_values * (len(kinds) - kinds.count("kda")),
        "recurrent states": states * kinds.count("kda") * (4 * shape.state_values + 2 * shape.conv_values) // recipe.tp,
    }


def propose_fraction(recipe: Recipe, machine: Machine, seen: Checkpoint, available: int) -> float | None:
    """`mem_fraction` for one pool of memory of which `available` bytes are free: what `pool_need` asks for, at most
    0.68. None where even that is too little (see `memory_need`)."""
    safest = recipe.with_(mem_fraction=SAFE_FRACTION)
    if sum(memory_need(safest, machine, seen).values()) > available:
        return None
    return min(SAFE_FRACTION, math.ceil(100 * sum(pool_need(recipe, machine, seen).values()) / available) / 100)


def check_memory(recipe: Recipe, machine: Machine, seen: Checkpoint, running: list[Record]) -> None:
    """Raise MachineError, with the sum, where MemAvailable or the GPU's memory is too small for a start."""
    if machine.unified_memory and (recipe.mem_fraction or 0) >= WEDGE_FRACTION:
        raise MachineError(
            f"recipe {recipe.name} asks for mem_fraction={recipe.mem_fraction}: at {WEDGE_FRACTION} and more a GB10's "
            f"driver can wedge until the plug is pulled; {SAFE_FRACTION} is safe (extra_args passes what you insist on)"
        )
    need = memory_need(recipe, machine, seen)
    available = available_bytes()
    if sum(need.values()) > available:
        terms = " + ".join(f"{name} {size / GIB:.1f}" for name, size in need.items())
        names = ", ".join(f"{r.recipe['name']} on port {r.port}" for r in running)
        hint = f"; running now: {names} (`sparkmoe stop` ends it)" if running else ""
        if machine.unified_memory and (fraction := propose_fraction(recipe, machine, seen, available)):
            hint += f"; it would fit with mem_fraction={fraction}"
        raise MachineError(
            f"not enough memory for recipe {recipe.name}: {sum(need.values()) / GIB:.1f} GiB needed ({terms}), "
            f"{available / GIB:.1f} GiB available{hint}"
        )
    if machine.gpu_memory_bytes and seen.weight_bytes > 0.95 * machine.gpu_memory_bytes:
        raise MachineError(
            f"the weights of {seen.path.name} are {seen.weight_bytes / GIB:.1f} GiB, "
            f"{machine.gpu_name} has {machine.gpu_memory_bytes / GIB:.1f} GiB"
        )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(port: int, host: str = "127.0.0.1") -> int:
    """`port` if a server could listen there. Raises MachineError that names who does, where the system tells."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return port
        except OSError as error:
            reason = error.strerror or str(error)
    who = ""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            who = f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    raise MachineError(f"port {port} on {host} is taken{who} ({reason}); choose another, or none for a free one")
