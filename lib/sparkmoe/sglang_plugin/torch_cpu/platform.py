"""What the CPU platform is, in SGLang's own terms: no Triton, no graphs, eager PyTorch, chain drafts.

SGLang asks these questions before it builds anything. Everything not overridden keeps SGLang's conservative default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

# jsonschema compiles a grammar for internationalized addresses when it is imported: 2.7 s of a start, in each process
# of a server, for a format that nobody asks for. Without that package it leaves the format unchecked.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
# In a server of this platform FlashInfer is as good as not installed, which SGLang allows for: its kernels need a GPU,
# and importing them takes seconds. (Asked for by name only: a process that picked this platform because it found
# no accelerator may still want to build kernels.)
if os.environ.get("SGLANG_PLATFORM") == "torch_cpu":
    sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]

REQUESTS = 8
STATES_PER_REQUEST = 8


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on the CPU."""

    _enum = PlatformEnum.OOT
    device_name = "torch_cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("EAGLE", "NEXTN")

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sparkmoe.sglang_plugin.torch_cpu.speculative import extend_cache_locs

        return extend_cache_locs

    def get_torch_profiler_activity_str(self) -> str:
        """A name of its own: SGLang adds an activity of this name to the CPU's, which is all there is to trace."""
        return "TORCH_CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """SGLang fills the free memory with recurrent states for the radix cache, gigabytes: keep it to some."""
        if server_args.max_running_requests is None:
            server_args.max_running_requests = REQUESTS
        if server_args.max_mamba_cache_size is None:
            server_args.max_mamba_cache_size = STATES_PER_REQUEST * server_args.max_running_requests

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sparkmoe.sglang_plugin.torch_cpu.model import prepare

        prepare(model)
