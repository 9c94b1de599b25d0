"""A routed-experts layer of Ling-3.0-flash's shape under one of SGLang's MoE backends, and its float64 formula."""

from typing import Any

import torch

HIDDEN, WIDTH, EXPERTS, TOP_K, SCALING = 2560, 768, 512, 8, 2.5
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def pack(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes [..., K] (0 to 15) → int8 [..., K / 2], the even column in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8).view(torch.int8)


def unpack(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float64 weight of packed codes [R, K / 2] and scales [R, K / 32]."""
    nibbles = packed.view(torch.uint8).long()
    codes = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).flatten(-2)
    return CODES.to(packed.device).double()[codes] * scales.double().repeat_interleave(32, dim=-1)


class Layer:
    """A routed-experts layer under one MoE backend, and the float64 formula for the same weights."""

    def __init__(self, sglang: Any, backend: str, limit: float | None, experts: int = EXPERTS) -> None:
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.moe.utils import MoeRunnerBackend
        from sglang.srt.layers.quantization.fp8 import Fp8Config
        from sglang.srt.runtime_context import get_flags

        get_flags().moe.runner_backend = MoeRunnerBackend(backend)
        config = Fp8Config(True, "dynamic", weight_block_size=[128, 128], is_fp4_experts=True)
        self.limit, self.device = limit, torch.device(sglang.device)
        with self.device:
            self.module = FusedMoE(
                num_experts=experts,
                hidden_size=HIDDEN,
                intermediate_size=WIDTH,
                layer_id=35,
                top_k=TOP_K,
                params_dtype=torch.bfloat16,
                quant_config=config,
                prefix="model.layers.35.mlp.experts",
                routed_scaling_factor=SCALING,
                gemm1_clamp_limit=limit,
            )
        generator = torch.Generator(self.device).manual_seed(0)
        self.weights = {}
        for name, rows, columns, scale in (("w13", 2 * WIDTH, HIDDEN, 2**-5), ("w2", HIDDEN, WIDTH, 2**-7)):
            shape = (experts, rows, columns)
            codes = torch.randint(0, 16, shape, generator=generator, device=self.device, dtype=torch.uint8)
            exponents = torch.randint(-1, 2, (experts, rows, columns // 32), generator=generator, device=self.device)
            scales = scale * 2.0**exponents
            self.weights[name] = (pack(codes), scales)
            getattr(self.module, f"{name}_weight").data.copy_(self.weights[name][0])
            getattr(self.module, f"{name}_weight_scale_inv").data.copy_(scales)

    def finish(self) -> None:
        self.module.quant_method.process_weights_after_loading(self.module)

    def inputs(self, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden [M, K] BF16, expert weights [M, 8], expert ids [M, 8])."""
        generator = torch.Generator(self.device).manual_seed(seed)
        hidden = torch.randn(tokens, HIDDEN, generator=generator, device=self.device).to(torch.bfloat16)
        scores = torch.rand(tokens, self.module.num_experts, generator=generator, device=self.device)
        weights, ids = scores.softmax(dim=-1).topk(TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.module.should_fuse_routed_scaling_factor_in_topk:
            weights = weights * SCALING
        return hidden, weights.float(), ids.to(torch.int32)

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        logits = torch.zeros(len(hidden), self.module.num_experts, device=self.device)
        return self.module(hidden, StandardTopKOutput(weights, ids, logits))

    def exact(
        self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, rows: int = 4, formula: str = "after"
    ) -> torch.Tensor:
        """The float64 result of the first `rows` tokens; `formula`: clamp "after" SiLU, "before" it, or "none"."""
        out = torch.zeros(min(rows, len(hidden)), HIDDEN, dtype=torch.float64, device=self.device)
        factor = 1.0 if self.module.should_fuse_routed_scaling_factor_in_topk else SCALING
        for token in range(len(out)):
            for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
                w13, w2 = (unpack(packed[expert], scales[expert]) for packed, scales in self.weights.values())
                gate, up = (w13 @ hidden[token].double()).chunk(2)
                out[token] += weight * factor * (w2 @ activation(gate, up, self.limit, formula))
        return out


def activation(gate: torch.Tensor, up: torch.Tensor, limit: float | None, formula: str) -> torch.Tensor:
    silu = torch.nn.functional.silu
    if limit is None or formula == "none":
        return silu(gate) * up
    if formula == "before":
        return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """‖found − exact‖ / ‖exact‖."""
    return float((found.double() - exact).norm() / exact.norm())
