"""Is this DGX Spark fit to serve? Judged from what it says about itself, one finding a question.

What goes wrong on a GB10 is seldom an error message. A power supply that negotiated badly leaves the GPU at a third of
its clock with every light green; a driver wedged by too large a load answers nothing, not even `nvidia-smi`; kernels
that are compiled while 60 GB of weights load take the machine's last memory with them. Each such case is a function
here from recorded answers (`spark_facts.Recorded`) to a `Finding`: what, found, expected, what to do. Thresholds come
from measurements where there are any (reads 231–235 GB/s of nominal 273) and from what owners report.

Written without a Spark at hand: the tests examine recorded and made-up answers, and nothing here has run on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparkmoe.findings import Finding, State
from sparkmoe.machine import GIB
from sparkmoe.spark_facts import (
    TIMED_OUT,
    Gpu,
    Recorded,
    read_apps,
    read_gpu,
    read_load,
    read_meminfo,
    read_ptxas,
    read_swaps,
)

CAPABILITY = "12.1"
CUDA_FOR_SM121 = (12, 9)  # the first ptxas that knows sm_121a
_MIN_DRIVER = 580  # CUDA 13.0
_NATIVE_CONTEXT = 262_144
_POWER_CYCLE = "shut down, pull the power plug for a minute, start again"


def examine(seen: Recorded, *, mine: frozenset[int] = frozenset()) -> list[Finding]:
    """All findings about a Spark. `mine` are the pids of servers on record, which may use the GPU."""
    gpu, load, memory = read_gpu(seen.smi), read_load(seen.load), read_meminfo(seen.meminfo)
    findings = [*_driver(seen, gpu), *_processes(seen, mine)]
    findings += [*_memory(memory, load), *_swap(seen, memory)]
    findings += [*_speed(load, gpu), *_toolchain(seen), *_humming(load), *_kernels(seen)]
    return findings + (list(_config(seen.config)) if seen.config is not None else [])


def _driver(seen: Recorded, gpu: Gpu | None) -> Iterator[Finding]:
    if "rmapiLockAcquire" in seen.kernel_log:
        yield Finding("driver wedge", "fail", "rmapiLockAcquire in the kernel's log", "none", _POWER_CYCLE)
    if TIMED_OUT in seen.smi:
        advice = f"the driver hangs: {_POWER_CYCLE}; then keep mem_fraction at 0.68 or less"
        yield Finding("driver answers", "fail", seen.smi.strip(), "an answer within a second", advice)
        return
    if gpu is None:
        said = seen.smi.strip().split("\n")[0][:120] or "there is no nvidia-smi"
        mismatch = "mismatch" in said
        advice = "restart: the driver was updated under a running kernel" if mismatch else "install the driver, restart"
        yield Finding("driver answers", "fail", said, "NVIDIA GB10", advice)
        return
    right = gpu.compute_capability == CAPABILITY
    advice = "" if right else "these checks are for a GB10; choose the profile with SPARKMOE_MACHINE"
    found = f"{gpu.name}, compute capability {gpu.compute_capability or 'not reported'}"
    yield Finding("GPU", "ok" if right else "fail", found, f"NVIDIA GB10, {CAPABILITY}", advice)
    major = int((gpu.driver or "0").split(".")[0])
    state: State = "fail" if major < _MIN_DRIVER else "warn" if major == 590 else "ok"
    advice = {"fail": "update DGX OS", "warn": "owners report hangs with CUDA graphs on this one", "ok": ""}[state]
    yield Finding("driver", state, gpu.driver or "not reported", f"{_MIN_DRIVER} or later (CUDA 13.0)", advice)
    reported = "not reported, as expected" if gpu.memory_mib is None else f"{gpu.memory_mib:,.0f} MiB"
    yield Finding("GPU memory", "ok", reported, "not reported: one pool with the CPU")


def _processes(seen: Recorded, mine: frozenset[int]) -> Iterator[Finding]:
    others = {pid: name for pid, name in read_apps(seen.apps).items() if pid not in mine}
    found = ", ".join(f"{name.rsplit('/', 1)[-1]} ({pid})" for pid, name in sorted(others.items())) or "none"
    advice = "they take from the same memory and slow down measurements; end them by pid if they are yours"
    yield Finding("GPU processes", "warn" if others else "ok", found, "none", advice if others else "")


def _memory(memory: dict[str, int], load: dict[str, Any]) -> Iterator[Finding]:
    if not memory:
        yield Finding("memory total", "fail", "/proc/meminfo cannot be read", "119–121 GiB", "is /proc mounted?")
        return
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    advice = "a limit of the container or firmware; the recipes are sized for the whole machine"
    state: State = "ok" if total >= 115 * GIB else "warn"
    yield Finding("memory total", state, f"{total / GIB:.1f} GiB", "119–121 GiB", advice if state == "warn" else "")
    cache = memory.get("Cached", 0) + memory.get("Buffers", 0)
    found = f"{available / GIB:.1f} GiB available, {cache / GIB:.1f} GiB page cache"
    if "free_bytes" in load:
        found += f"; cudaMemGetInfo says {load['free_bytes'] / GIB:.1f} GiB free"
    advice = "believe MemAvailable: it counts page cache that is given back, cudaMemGetInfo and `free` do not"
    yield Finding("page cache", "ok", found, "", advice if cache > available / 4 else "")
    pages = memory.get("HugePages_Total", 0) * memory.get("Hugepagesize", 0)
    if pages > GIB:
        advice = "nothing here uses them: sysctl vm.nr_hugepages=0"
        yield Finding("huge pages", "warn", f"{pages / GIB:.1f} GiB reserved", "none", advice)


def _swap(seen: Recorded, memory: dict[str, int]) -> Iterator[Finding]:
    size, used = read_swaps(seen.swaps) if seen.swaps else (0, 0)
    if not seen.swaps and (size := memory.get("SwapTotal", 0)):
        used = size - memory.get("SwapFree", 0)
    state: State = "warn" if used > GIB // 2 else "ok"
    advice = "the machine is or was short of memory; close programs, then `sudo swapoff -a && sudo swapon -a`"
    yield Finding("swap", state, f"{used / GIB:.1f} of {size / GIB:.1f} GiB in use", "less than 0.5 GiB",
                  advice if state == "warn" else "")  # fmt: skip


def _speed(load: dict[str, Any], gpu: Gpu | None) -> Iterator[Finding]:
    if not load:
        return
    power = load.get("power_w")
    watts = "power not reported" if power is None else f"{power:.0f} W"
    if (clock := load.get("sm_mhz")) is None:
        yield Finding("clock", "ok", f"not reported under load, {watts}", "2,000 MHz and more")
    else:
        most = f", {gpu.sm_max_mhz:.0f} at most" if gpu and gpu.sm_max_mhz else ""
        low = clock < 1000 or (clock < 1500 and power is not None and power < 30)
        advice = f"a badly negotiated power supply does this: {_POWER_CYCLE}, with the original adapter"
        yield Finding("clock", "warn" if low else "ok", f"{clock:.0f} MHz under load{most}, {watts}",
                      "2,000 MHz and more", advice if low else "")  # fmt: skip
    if (heat := load.get("temperature_c")) is not None and heat >= 88:
        yield Finding("temperature", "warn", f"{heat:.0f} °C after 3 s", "below 88 °C", "free its air inlets")
    rate = load.get("gb_s", 0.0)
    slow = rate < 200
    advice = "look at the clock above and at other processes; with both right, update the firmware"
    yield Finding("bandwidth", "warn" if slow else "ok", f"{rate:.0f} GB/s", "225–235 GB/s", advice if slow else "")


def _toolchain(seen: Recorded) -> Iterator[Finding]:
    main = seen.packages.get("flashinfer-python")
    differ = [
        f"{name} {version}"
        for name in ("flashinfer-cubin", "flashinfer-jit-cache")
        if (version := seen.packages.get(name)) and main and version.split("+")[0] != main.split("+")[0]
    ]
    wrong, found = bool(differ) or not main, ", ".join([f"flashinfer-python {main or 'missing'}", *differ])
    advice = "install the lock anew: make spark-install" if wrong else ""
    yield Finding("flashinfer", "fail" if wrong else "ok", found, "equal versions, or no cubin package", advice)
    lacking = [what for what, there in (("c++", seen.cxx), ("Python.h", seen.python_h)) if not there]
    advice = "Triton and FlashInfer compile while serving: apt-get install g++ python3-dev" if lacking else ""
    found = f"no {', no '.join(lacking)}" if lacking else f"{seen.cxx}, Python.h"
    yield Finding("compiler", "fail" if lacking else "ok", found, "c++ and Python.h", advice)
    if not seen.ptxas:
        yield Finding("ptxas", "fail", "none found", "one that knows sm_121a", "install the lock: it brings nvcc")
    for path, text in seen.ptxas.items():
        release = read_ptxas(text)
        knows = release is not None and release >= CUDA_FOR_SM121
        said = f"CUDA {release[0]}.{release[1]}" if release else text.strip().split("\n")[-1][:60] or "no answer"
        advice = "" if knows else "it cannot assemble sm_121a; point TRITON_PTXAS_PATH and CUDA_HOME at the lock's"
        yield Finding("ptxas", "ok" if knows else "fail", f"{said} in {path}", "CUDA 12.9 or later", advice)


def _humming(load: dict[str, Any]) -> Iterator[Finding]:
    if error := load.get("humming_error"):
        advice = "Humming asks NVML for a memory clock, which a GB10 lacks; the lock's version knows that"
        yield Finding("humming bandwidth", "fail", str(error)[:120], "273 GB/s", advice)
    elif rate := load.get("humming_gb_s"):
        fits = 200 <= rate <= 300
        advice = "" if fits else "Humming picks its tiles by this number; install the lock's version"
        yield Finding("humming bandwidth", "ok" if fits else "warn", f"{rate:.0f} GB/s", "273 GB/s", advice)


def _kernels(seen: Recorded) -> Iterator[Finding]:
    done, wanted = seen.objects
    built = wanted > 0 and done >= wanted
    found = f"{done} of {wanted} objects of FlashInfer's fused MoE" if wanted else "FlashInfer's fused MoE: none"
    advice = "run `sparkmoe precompile` first: building while the weights load can take the last memory"
    yield Finding("kernels", "ok" if built else "warn", found, "all", "" if built else advice)


def _config(config: dict[str, Any]) -> Iterator[Finding]:
    quantization = config.get("quantization_config") or {}
    experts = quantization.get("routed_experts_quant_method") or quantization.get("quant_method") or "bf16"
    context, scaling = config.get("max_position_embeddings"), config.get("rope_scaling")
    drafts = int(config.get("num_nextn_predict_layers") or 0)
    wrong = []
    if experts != "mxfp4":
        wrong.append("the experts are not MXFP4: the recipes with flashinfer_mxfp4 cannot run")
    if not drafts:
        wrong.append("no NEXTN layer: it cannot draft for itself")
    if scaling:
        wrong.append("rope_scaling is set, as in older cards: download config.json anew")
    elif context and context < _NATIVE_CONTEXT:
        wrong.append(f"the published model has {_NATIVE_CONTEXT:,} tokens of context")
    found = f"{context or 0:,} tokens, experts {experts}, {drafts} NEXTN layer(s), rope_scaling {scaling or 'none'}"
    yield Finding("config", "warn" if wrong else "ok", found, f"{_NATIVE_CONTEXT:,} tokens, mxfp4, 1", "; ".join(wrong))
