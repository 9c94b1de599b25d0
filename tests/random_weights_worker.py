"""Run by test_random_weights.py: SGLang's own model in its FP4 form, filled by the plugin on a CPU, not yet repacked.

Builds four layers of Ling-3.0's architecture as the dummy loader would for Humming's experts. Prints
"filled N parameters" once every one of them is finite and none is constant that should not be.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe import topk
from sglang.srt.model_loader import loader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import prepare_server_args

from sparkmoe.engine import free_port
from sparkmoe.nano.bundle import BUNDLE
from sparkmoe.roofline import expected_distinct
from sparkmoe.sglang_plugin import random_weights

LAYERS = 4
CONSTANT = ("norm", "expert_bias", "k_scale", "v_scale")

random_weights.register()
HookRegistry.apply_hooks()
config = json.loads((BUNDLE / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
config |= {key: config[key][:LAYERS] for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")}
folder = Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps(config))
argv = ["--model-path", str(folder), "--device", "cpu", "--load-format", "dummy", "--disable-radix-cache"]
args = prepare_server_args([*argv, "--moe-runner-backend", "humming"])
publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=free_port())
model_config = ModelConfig.from_server_args(args)
bootstrap.init_layer_runtime(model_config=model_config)
load = LoadConfig(load_format="dummy")
with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
    model = loader._initialize_model(model_config, load, loader._get_quantization_config(model_config, load))
for parameter in model.parameters():
    parameter.data.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in every floating-point format
loader.initialize_dummy_weights(model)
formats = {str(parameter.dtype) for parameter in model.parameters()}
for name, parameter in model.named_parameters():
    values = parameter.detach().float()
    if not values.isfinite().all():
        sys.exit(f"{name} {parameter.dtype} is not finite")
    one = any(word in name for word in CONSTANT) or (name.endswith("weight_scale_inv") and ".experts." not in name)
    if (len(values.unique()) == 1) != one:
        sys.exit(f"{name} {parameter.dtype} has {len(values.unique())} different values")
if not {"torch.int8", "torch.float8_e4m3fn"} <= formats:
    sys.exit(f"no FP4 experts or no FP8 matrices among {formats}")
# SGLang's own routing of a prompt, with the router as it was filled, is kept.
block = next(module for name, module in model.named_modules() if name.endswith("layers.2.mlp"))
hidden = torch.randn(512, config["hidden_size"], generator=torch.Generator().manual_seed(0))
topk.select_experts(hidden, hidden @ block.gate.weight.t(), block.topk.topk_config, layer_id=2)
found, top_k = random_weights.spread(random_weights.routed[2]), config["num_experts_per_tok"]
for tokens in (1, 2, 4):
    expected = expected_distinct(config["num_experts"], top_k, tokens)
    if not 0.85 * expected < found[str(tokens)] < 1.05 * expected:
        sys.exit(f"{tokens} tokens chose {found[str(tokens)]} experts, expected {expected}")
print(f"filled {len(list(model.parameters()))} parameters of {', '.join(sorted(formats))}")  # noqa: T201
