"""Load a model as SGLang does, one shard in this process, and save its head's logits: `head_worker.py SPEC.json`.

SGLang keeps its configuration and process groups in globals, so each shard needs an interpreter of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(spec: dict[str, Any]) -> None:
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    argv = ["--model-path", spec["model"], "--device", "cpu", "--dtype", "float32", "--tp-size", str(spec["shards"])]
    args = prepare_server_args([*argv, "--disable-radix-cache", *spec.get("flags", ())])
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=spec["rank"], dp_rank=None, gpu_id=spec["rank"]))
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=spec["port"])
    bootstrap.init_layer_runtime(model_config=config)
    model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    head = model.lm_head
    hidden = torch.randn(5, config.hf_config.hidden_size, generator=torch.Generator().manual_seed(1))
    logits = model.logits_processor._compute_lm_head(hidden, head)
    facts = {"class": type(model).__name__, "dtype": str(head.weight.dtype), "rows": logits.shape[1]}
    scale = getattr(head, "weight_scale", None)
    facts["bytes"] = head.weight.numel() * head.weight.element_size() + (4 * scale.numel() if scale is not None else 0)
    torch.save({"logits": logits, "facts": facts}, Path(spec["out"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
