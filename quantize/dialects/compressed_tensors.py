"""The dialect of compressed-tensors, which llm-compressor writes: `quant_method` compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_nvfp4.quantize.dialects.base import EMBEDDING, Dialect, QuantizationInfo, as_patterns, check_group

FORMAT = "nvfp4-pack-quantized"
HEAD = "re:.*lm_head$"  # a target of its own, as the name of vLLM's class for heads does not contain "Linear"


class CompressedTensors(Dialect):
    name = "compressed-tensors"
    methods = ("compressed-tensors",)
    keys = frozenset({"config_groups", "format", "quantization_status", "global_compression_ratio", "kv_cache_scheme"})
    weight, sf, global_scale = "weight_packed", "weight_scale", "weight_global_scale"
    input_scale = "input_global_scale"
    scale_shape = (1,)
    reciprocal = True
    renamed = True  # by vLLM (CompressedTensorsConfig.apply_vllm_mapper)

    def read(self, q: Mapping, hf: Mapping) -> QuantizationInfo | None:
        groups = q.get("config_groups") or {}
        formats = {g.get("format") or q.get("format") for g in groups.values()} or {q.get("format")}
        if FORMAT not in formats:
            return None
        sparsity = (q.get("sparsity_config") or {}).get("format", "dense")
        refused = {
            "transforms (rotations)": (q.get("transform_config") or {}).get("config_groups"),
            f"sparsity {sparsity!r}": sparsity != "dense",
            "fewer experts in some layers (moe_sparsity_config)": q.get("moe_sparsity_config"),
        }
        if what := next((name for name, there in refused.items() if there), None):
            raise ValueError(
                f"compressed-tensors files with {what} are not read: load them with the tool that wrote them, or "
                "quantize the original checkpoint (moe-nvfp4 quantize SRC DST)"
            )
        activations = set()
        for group in groups.values():
            if (group.get("format") or q.get("format")) != FORMAT:
                continue
            check_group(group)
            if not (targets := group.get("targets")) or not all(map(EMBEDDING.search, targets)):
                activations.add("nvfp4" if group.get("input_activations") else "bf16")
        whole = any("Linear" in (group.get("targets") or ()) for group in groups.values())
        return QuantizationInfo(
            self, tuple(as_patterns(q.get("ignore"), "ignore")), None, max(activations, default="bf16"),
            q.get("kv_cache_scheme"), whole, len(activations) > 1,
        )  # fmt: skip

    def write(
        self, ignore: list[str], input_scale: bool, own: dict, version: str, pre_quant_scale: bool = False
    ) -> dict:
        numbers = {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
            "scale_dtype": "torch.float8_e4m3fn",
        }  # fmt: skip
        head = [] if "lm_head" in ignore else [HEAD]  # only if it is there: its readers warn of targets that are not
        return {
            "quant_method": "compressed-tensors",
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear", *head],
                    "format": FORMAT,
                    "weights": {**numbers, "dynamic": False},
                    "input_activations": {**numbers, "dynamic": "local"} if input_scale else None,
                    "output_activations": None,
                }
            },
            "ignore": ignore,
            "kv_cache_scheme": None,
            "moe_nvfp4": own,
        }

    def pattern(self, wildcard: str) -> str:
        """A `re:` expression, or the name itself if there is no `*`."""
        if "*" not in wildcard:
            return wildcard
        start = wildcard.removesuffix("*")
        end = ".*" if start != wildcard and not start.endswith(".") else "$"
        return "re:" + re.escape(start if end == ".*" else wildcard).replace(r"\*", r"\d+") + end

    def kv_cache_scheme(self, found: Any) -> Any:
        # Numbers of bits; ModelOpt's names are of other formats. vLLM refuses a scheme without the first two keys
        return {"strategy": "tensor", "symmetric": True, **found} if isinstance(found, Mapping) else None

    def misread_by(self, q: Mapping, stacked: bool, indexed: bool) -> list[str]:
        found = ["transformers 5.24 by itself loads these experts with wrong numbers: "
                 "import moe_nvfp4.integrations.huggingface first"]  # fmt: skip
        if indexed:  # else it ends in an error
            found.append("vLLM 0.32 by itself passes over 4-bit q, k and v beside an indexer's (MiniMax-M3) without a "
                         "word: leave attention out of --linears")  # fmt: skip
        return found
