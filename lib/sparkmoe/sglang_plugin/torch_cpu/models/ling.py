"""Ling-3.0 and its NEXTN draft: SGLang's own classes."""

from sglang.srt.models.bailing_moe_nextn import BailingMoeForCausalLMNextN
from sglang.srt.models.bailing_moe_v3 import BailingMoeV3ForCausalLM

EntryClass = [BailingMoeV3ForCausalLM, BailingMoeForCausalLMNextN]
