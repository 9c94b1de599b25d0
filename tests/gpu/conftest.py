"""One process of SGLang on a GPU, without a server: its configuration, process groups and hooks.

Findings go to the JSON file named by SPARKMOE_GPU_RECORD as they are made, so that a stay that ends early keeps them.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

MODELS = Path(__file__).parents[2] / "lib" / "sparkmoe" / "models"


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    path = os.environ.get("SPARKMOE_GPU_RECORD")
    found: dict[str, Any] = {}

    def add(name: str, **facts: Any) -> None:
        found[name] = facts
        if path:
            Path(path).write_text(json.dumps(found, indent=1, default=str))

    return add


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang's configuration and process groups, with the levers' hooks applied."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    from sparkmoe.engine import free_port
    from sparkmoe.sglang_plugin import humming_clamp

    device = "cuda" if torch.cuda.is_available() else "cpu"
    humming_clamp.register()
    HookRegistry.apply_hooks()
    folder = tmp_path_factory.mktemp("ling")
    (folder / "config.json").write_text((MODELS / "ling-3.0-flash-fp4.json").read_text())
    argv = ["--model-path", str(folder), "--device", device, "--load-format", "dummy", "--disable-radix-cache"]
    args = prepare_server_args([*argv, "--attention-backend", "triton", "--moe-runner-backend", "marlin"])
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    bootstrap.init_parallel_runtime(server_args=args, device=device, dist_port=free_port())
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(args))
    return SimpleNamespace(args=args, device=device)
