"""ModelOpt's dialect: `quant_method` modelopt, and hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping

from moe_nvfp4.quantize.dialects.base import EMBEDDING, Dialect, QuantizationInfo, as_patterns, check_group

# quant_algo of ModelOpt -> activations
ALGOS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "bf16", "NVFP4_AWQ": "nvfp4"}
# kv_cache_quant_algo of ModelOpt's hf_quant_config.json -> kv_cache_scheme of config.json, as ModelOpt converts it
KV_SCHEMES = {"FP8": {"dynamic": False, "num_bits": 8, "type": "float"}}


class ModelOpt(Dialect):
    name = "modelopt"
    methods = ("modelopt", "moe_nvfp4", "fp8")  # fp8: of another format, but for its moe_quant_algo
    keys = frozenset({
        "quant_algo", "moe_quant_algo", "config_groups", "producer", "quantized_layers", "group_size",
        "exclude_modules", "global_compression_ratio", "kv_cache_scheme", "kv_cache_quant_algo", "quantization",
    })  # fmt: skip
    weight, sf, global_scale, input_scale = "weight", "weight_scale", "weight_scale_2", "input_scale"
    pre_quant_scale = True

    def read(self, q: Mapping, hf: Mapping) -> QuantizationInfo | None:
        if q.get("quant_method") == "fp8" and not self.is_nvfp4(q):
            return None
        q = {**hf, **q}
        algo, q = modelopt_algo(q), {**(q.get("quantization") or {}), **q}
        products, awq = {algo}, algo == "NVFP4_AWQ"
        ignore = tuple(dict.fromkeys(p for key in ("ignore", "exclude_modules") for p in as_patterns(q.get(key), key)))
        kv = q.get("kv_cache_scheme") or q.get("kv_cache_quant_algo")
        layers = None
        if algo == "MIXED_PRECISION":
            layers = {name: entry["quant_algo"].upper() for name, entry in (q.get("quantized_layers") or {}).items()}
            unknown = {a for a in layers.values() if a.startswith(("NVFP4", "W4A")) and a not in ALGOS}
            if unknown:
                raise ValueError(_unsupported(", ".join(sorted(unknown))))
            used = {name: a for name, a in layers.items() if a in ALGOS}
            if "quantized_layers" not in q:
                raise ValueError(
                    "quant_algo MIXED_PRECISION without quantized_layers, which say what each layer is: if "
                    "hf_quant_config.json has them, take quantization_config out of config.json (vLLM reads one of "
                    "the two), else download both again"
                )
            if not used:
                raise ValueError("quant_algo MIXED_PRECISION names no NVFP4 layer: nothing here is for this library")
            products = {a for name, a in used.items() if not EMBEDDING.search(name)} or set(used.values())
            algo = min(products)
        if algo not in ALGOS:
            raise ValueError(_unsupported(algo))
        size = q.get("group_size", 16)
        if size != 16:
            raise ValueError(f"NVFP4 has blocks of 16, the checkpoint says group_size {size}")
        activations = ALGOS[algo]
        groups = q.get("config_groups") or {}
        for group in groups.values() if layers is None else ():  # those of other layers may be FP8
            check_group(group)
        if algo == "NVFP4" and groups and not any(group.get("input_activations") for group in groups.values()):
            activations = "bf16"  # ModelOpt would write W4A16_NVFP4; vLLM reads this as the same
        if isinstance(kv, str):
            kv = KV_SCHEMES.get(kv, kv)
        mixed = len({ALGOS[a] for a in products}) > 1
        return QuantizationInfo(self, ignore, layers, activations, kv, layers is None, mixed, awq)

    def write(
        self, ignore: list[str], input_scale: bool, own: dict, version: str, pre_quant_scale: bool = False
    ) -> dict:
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"weights": numbers, "targets": ["Linear"]}
        if input_scale:
            group["input_activations"] = dict(numbers)
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4_AWQ" if pre_quant_scale else "NVFP4" if input_scale else "W4A16_NVFP4",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "producer": {"name": "moe_nvfp4", "version": version},
            "moe_nvfp4": own,
        }

    def is_nvfp4(self, q: Mapping) -> bool:
        if q.get("quant_method") == "fp8":
            return "moe_quant_algo" in q
        return modelopt_algo(q) in (*ALGOS, "MIXED_PRECISION")

    def misread_by(self, q: Mapping, stacked: bool, indexed: bool) -> list[str]:
        found = []
        if q["quant_algo"] == "W4A16_NVFP4":
            found.append("SGLang 0.5.23 on a Blackwell GPU takes these W4A16 weights for W4A4, with an activation "
                         "scale of 1: give it --moe-runner-backend marlin")  # fmt: skip
        if stacked:  # else it refuses them
            found.append("transformers 5.24 by itself does not find these experts, and runs the model with random "
                         "ones: import moe_nvfp4.integrations.huggingface first")  # fmt: skip
        return found


def modelopt_algo(q: Mapping) -> str:
    """The quant_algo of ModelOpt's quantization_config, in capitals; "" if it has none.

    It may be at the top or under "quantization", as in hf_quant_config.json. vLLM reads both, too.
    """
    inner = q.get("quantization") or {}
    return str(q.get("moe_quant_algo") or q.get("quant_algo") or inner.get("quant_algo") or "").upper()


def _unsupported(algo: str) -> str:
    way = "Convert this checkpoint" if "MXFP4" in algo else "Quantize the original checkpoint again"
    return (
        f"quant_algo {algo or None!r}; this library reads {', '.join(ALGOS)}. {way} (moe-nvfp4 quantize SRC DST), or "
        "load this one with the tool that wrote it"
    )
