"""SGLang on a plain CPU: an out-of-tree platform and PyTorch stand-ins for the Triton kernels that Ling-3.0 reaches.

SGLang asks every installed platform whether it wants the machine. This one answers only when it is asked for by
name, or when there is no accelerator at all and nobody has chosen SGLang's own CPU engine: a GPU machine with
sparkmoe installed keeps its platform.
"""

from __future__ import annotations

import os

PLATFORM = "sparkmoe.sglang_plugin.torch_cpu.platform.TorchCpuPlatform"


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: dotted name of the platform class, or None to stand aside."""
    wanted = os.environ.get("SGLANG_PLATFORM")
    if wanted:
        return PLATFORM if wanted == "torch_cpu" else None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_present():
        return None
    return PLATFORM


def accelerator_present() -> bool:
    """Whether PyTorch sees a device other than the CPU (CUDA, ROCm, XPU, MPS, or a vendor's)."""
    import torch

    return bool(torch.cuda.is_available() or torch.accelerator.is_available())
