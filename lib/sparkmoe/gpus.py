"""Which NVIDIA GPUs are there, and what do they do at this moment? Asked of NVML, which starts no CUDA context.

Only the GPUs that `CUDA_VISIBLE_DEVICES` shows count, in its order: those a server would be given. What a GPU does not
report is absent or None; a GB10 has no memory of its own, and says "not supported" when it is asked how much.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

# Nominal bandwidth of device memory in GB/s, from the vendors' data sheets; the first name that the GPU's contains.
_NOMINAL_GB_S = {
    "GB10": 273.0,
    "A100": 2039.0,
    "H100 PCIe": 2000.0,
    "H100": 3350.0,
    "GH200": 4900.0,
    "H200": 4800.0,
    "B200": 8000.0,
    "B300": 8000.0,
    "RTX 4090": 1008.0,
    "RTX 5090": 1792.0,
}


def visible_gpus(nvml: Any) -> list[Any]:
    """NVML's handles of the visible GPUs; `nvml` is initialised.

    `CUDA_VISIBLE_DEVICES` is read as CUDA reads it: indices or beginnings of UUIDs, up to the first that names no GPU.
    So empty or "-1" hides all. A slice of one (MIG) counts as the first. Indices count in NVML's order, by PCI address,
    which is CUDA's where all GPUs are alike or `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and named.strip() in ("", "-1"):
        return []
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if named is None:
        return every
    if named.strip().startswith("MIG-"):
        return every[:1]
    known = {str(index): gpu for index, gpu in enumerate(every)}
    uuids = {_text(nvml.nvmlDeviceGetUUID(gpu)): gpu for gpu in every}
    found: list[Any] = []
    for part in map(str.strip, named.split(",")):
        matches = [gpu for uuid, gpu in uuids.items() if part.startswith("GPU-") and uuid.startswith(part)]
        gpu = known.get(part, matches[0] if matches else None)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return found


def read_gpu(nvml: Any = None) -> dict[str, Any] | None:
    """The visible GPUs as fields of `Machine`, None where NVML finds none. Of several the first one is described.

    `nvml` is for tests; by default the NVML of this machine is asked.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        shown = visible_gpus(nvml)
        if not shown:
            return None
        name = _text(nvml.nvmlDeviceGetName(shown[0]))
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(shown[0])
        try:
            memory: int | None = int(nvml.nvmlDeviceGetMemoryInfo(shown[0]).total) or None
        except nvml.NVMLError:
            memory = None
        return {
            "gpu_name": name,
            "gpu_count": len(shown),
            "compute_capability": (int(major), int(minor)),
            "gpu_memory_bytes": memory,
            "unified_memory": memory is None,
            "nominal_gb_s": nominal_gb_s(name),
        }
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def nvml_facts() -> dict[str, Any]:
    """Driver version, and clocks in MHz, power in W and temperature in °C of each visible GPU; empty without any."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    asked = {
        "sm_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "sm_max_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "memory_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    }
    try:
        gpus: list[dict[str, float]] = []
        for handle in visible_gpus(pynvml):
            facts: dict[str, float] = {}
            for name, ask in asked.items():
                with contextlib.suppress(pynvml.NVMLError):
                    facts[name] = ask(handle)
            gpus.append(facts)
        return {"driver": str(pynvml.nvmlSystemGetDriverVersion()), "gpus": gpus}
    finally:
        pynvml.nvmlShutdown()


def nominal_gb_s(gpu_name: str) -> float | None:
    """Data-sheet bandwidth in GB/s for a GPU's NVML name, None if the table does not hold it."""
    matches = [key for key in _NOMINAL_GB_S if key in gpu_name]
    return _NOMINAL_GB_S[max(matches, key=len)] if matches else None


def _text(raw: str | bytes) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
