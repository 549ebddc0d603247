"""All uses of vLLM's internals, which change with its versions. Written for 0.26 to 0.33."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import vllm
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from vllm import envs
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed import get_ep_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_safetensors_params_metadata

from moe_nvfp4.backends import Device, named
from moe_nvfp4.integrations.placement import COPIED, SCRATCH
from moe_nvfp4.integrations.vllm import NAME
from moe_nvfp4.integrations.vllm.config import READERS, Model, version
from moe_nvfp4.integrations.vllm.linear_adapters import check_adapters
from moe_nvfp4.integrations.vllm.loading import opened
from moe_nvfp4.integrations.vllm.mends import complete_adapters
from moe_nvfp4.integrations.vllm.reload import check_reloads
from moe_nvfp4.integrations.vllm.unwritten import Converted, tensors
from moe_nvfp4.quantize.dialects.compressed_tensors import FORMAT
from moe_nvfp4.quantize.dialects.modelopt import ALGOS
from moe_nvfp4.quantize.files import Checkpoint, TensorSlice
from moe_nvfp4.quantize.layouts.stacked import STACKS
from moe_nvfp4.weights import Gate

STEP_LIMIT = 7.0  # what vLLM's swiglustep kernel uses, whatever the model's config says
# transformers' names of activation functions -> vLLM's
ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "relu2": "relu2"} | dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh")  # fmt: skip
BY_REQUEST = (0, 32)  # the oldest version in which requests choose adapters of experts
OAI = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}  # what vLLM's swigluoai kernel uses


def base_config(config: dict) -> QuantizationConfig:
    """vLLM's own config for a `quantization_config`, which handles everything but experts: of the first variant that
    takes it, or of its quant_method."""
    variants = READERS[config["quant_method"]]
    chosen = [v for v in variants if get_quantization_config(v).override_quantization_method(config, None) == v]
    name = chosen[0] if chosen else config["quant_method"]
    return get_quantization_config(name).from_config(dict(config))


def channels_group() -> torch.distributed.ProcessGroup:
    """The ranks that split the channels of this one's experts: of tensor parallelism, and of data parallelism too."""
    return get_ep_group().device_group  # vLLM calls them so without --enable-expert-parallel too


def renamed(base: QuantizationConfig, mapper: Any) -> list[str]:
    """Let vLLM's own config give the modules on its ignore list the names that they have in vLLM. Returns the list."""
    base.apply_vllm_mapper(mapper)
    key = "exclude_modules" if getattr(base, "exclude_modules", None) else "ignore"
    # Jamba's mapper takes ".self_attn." out of names, and would make ".self_attn.*" a wildcard for all modules
    names = [name for name in getattr(base, key, None) or () if not name.endswith(".*.*")]
    setattr(base, key, names)
    return names


def activations_of(
    base: QuantizationConfig, layer: RoutedExperts, prefix: str, default: str, chosen: str | None = None
) -> str | None:
    """The activations that the experts of `layer` were made for, "nvfp4" or "bf16"; None if they are not NVFP4.

    default  what our own reader says, for files in which all layers are alike
    chosen   by the user, for all layers

    NotImplementedError if its matrices were made for different ones.
    """
    if hasattr(base, "get_scheme_dict"):  # compressed-tensors
        base._add_fused_moe_to_target_scheme_map()
        names = [layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name, layer.ckpt_up_proj_name]
        found = {_of_scheme(base.get_scheme_dict(layer, f"{prefix}.0.{name}")) for name in names if name}
    elif hasattr(base, "_resolve_quant_algo"):  # ModelOpt, mixed precision
        inside = [value for name, value in base.quantized_layers.items() if name.startswith(f"{prefix}.")]
        algos = {value["quant_algo"].upper() for value in inside} or {base._resolve_quant_algo(prefix)}
        found = {ALGOS.get(algo) for algo in algos}
    else:
        return default
    if len(found) > 1 and (chosen is None or None in found):
        raise NotImplementedError(
            f"{prefix}: by the config, some of its matrices are for {' and others for '.join(sorted(map(str, found)))} "
            "activations (None: not NVFP4), and experts run in one way. For NVFP4 ones choose it: "
            """--hf-overrides '{"moe_nvfp4": {"activations": "bf16"}}'"""
        )
    return found.pop()


def linear_activations(base: QuantizationConfig, prefix: str, default: str) -> str | None:
    """The activations that the linear or head `prefix` was made for; None if it is not NVFP4."""
    if hasattr(base, "get_scheme_dict"):
        file = torch.nn.Linear(1, 1, device="meta")  # what it is in files; vLLM would not find a head
        return _of_scheme(base.get_scheme_dict(file, prefix))
    if base.is_layer_excluded(prefix):
        return None
    return ALGOS.get(base._resolve_quant_algo(prefix)) if hasattr(base, "_resolve_quant_algo") else default


def _of_scheme(scheme: dict | None) -> str | None:
    """The activations of a scheme of compressed-tensors; None if it is not NVFP4."""
    if scheme is None or scheme["format"] != FORMAT:
        return None
    return "bf16" if scheme.get("input_activations") is None else "nvfp4"


def added_bias(layer: torch.nn.Module) -> Tensor | None:
    """The bias that a linear's method is asked to add on this rank."""
    elsewhere = isinstance(layer, RowParallelLinear) and layer.tp_rank > 0
    if not isinstance(layer, LinearBase) or layer.bias is None or layer.skip_bias_add or elsewhere:
        return None
    return layer.bias.data


def gate_of(
    layer: RoutedExperts, said: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Gate, Callable[[Tensor], Tensor] | None]:
    """The layer's gate; if its kind is "raw", also the function that computes it.

    said  what the model's config says of it (`config.gate_settings`), of which vLLM's models pass on a part

    NotImplementedError for a gate that is not known here, or that is not the one of the config.
    """
    kind, limit = layer.activation.value, layer.swiglu_limit or math.inf
    alpha = 1.0 if layer.swiglu_alpha is None else layer.swiglu_alpha
    beta = layer.swiglu_beta or 0.0
    if kind == "swigluoai_uninterleave" and limit < math.inf:
        return Gate("silu", alpha=alpha, limit=limit, up_offset=beta), None
    act, basic = said.get("hidden_act"), kind.removesuffix("_no_mul")
    if act in ACT2FN and basic in ACTS.values() and ACTS.get(act) != basic:
        raise NotImplementedError(
            f"{layer.layer_name}: the model's config says {act!r}, and vLLM's model computes {basic!r}, "
            "whatever it says: serve this model with transformers (moe-nvfp4 serve MODEL --engine transformers)"
        )
    if kind == "swigluoai" and limit in (OAI["limit"], math.inf) and alpha in (OAI["alpha"], 1.0):
        own = {"alpha": said.get("swiglu_alpha"), "limit": said.get("swiglu_limit")}
        oai = OAI | {key: value for key, value in own.items() if value is not None}
        return Gate("silu", **oai), None  # gpt-oss: vLLM interleaves rows of gate and up, we do not
    if kind == "silu" and (alpha, beta) == (1.0, 0.0):
        return Gate("silu", limit=limit), None
    if kind == "swiglustep" and limit in (STEP_LIMIT, math.inf):
        return Gate("silu", limit=STEP_LIMIT, clamp_after=True), None
    if limit == math.inf and (alpha, beta) == (1.0, 0.0):
        if kind == "gelu_tanh":
            return Gate("gelu_tanh"), None
        if kind == "relu2_no_mul":
            return Gate("relu2", gated=False), None
        if kind in _UNFUSED:
            return Gate("raw", gated=not kind.endswith("_no_mul")), _UNFUSED[kind]
        if kind == "situ" and layer.moe_config.activation_situ_beta is not None:
            return Gate("raw"), _situ(layer.moe_config)
    raise NotImplementedError(
        f"{layer.layer_name}: activation {kind!r} with swiglu_limit={layer.swiglu_limit}, "
        f"swiglu_alpha={layer.swiglu_alpha}, swiglu_beta={layer.swiglu_beta} is not known here. "
        "Serve this model with transformers (moe-nvfp4 serve MODEL --engine transformers)"
    )


def _gelu(w13_out: Tensor) -> Tensor:
    gate, up = w13_out.chunk(2, dim=-1)
    return F.gelu(gate) * up


_UNFUSED = {
    "gelu": _gelu,
    "silu_no_mul": F.silu,
    "gelu_no_mul": F.gelu,
    "gelu_tanh_no_mul": lambda up: F.gelu(up, approximate="tanh"),
}


def _situ(moe) -> Callable[[Tensor], Tensor]:
    """Kimi's gate: beta * tanh(g / beta) * sigmoid(g) * u; u is clipped by tanh in the same way if it has a beta."""
    beta, linear = moe.activation_situ_beta, moe.activation_situ_linear_beta

    def gate(w13_out: Tensor) -> Tensor:
        g, u = w13_out.float().chunk(2, dim=-1)
        u = u if linear is None else linear * torch.tanh(u / linear)
        return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(w13_out.dtype)

    return gate


def refuse(layer: RoutedExperts, dense: bool = False, adapter: bool = False) -> None:
    """NotImplementedError or ValueError if vLLM is set up in a way that this layer does not support.

    dense    the files' experts are bf16, and are quantized as they are read
    adapter  experts get an adapter
    """
    moe, name = layer.moe_config, layer.layer_name
    _refuse_modes(name)
    parallel, lora = moe.moe_parallel_config, get_current_vllm_config().lora_config
    if parallel.enable_eplb:
        raise NotImplementedError(
            f"{name}: EPLB moves experts between ranks, which is not supported: omit --enable-eplb"
        )
    if parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels:
        raise NotImplementedError(
            f"{name}: --all2all-backend {parallel.all2all_backend} wants experts in vLLM's own form: "
            "choose allgather_reducescatter"
        )
    by_request = chosen_by_request()
    if by_request:
        _refuse_by_request(layer, adapter)
    check_reloads()
    if lora is not None:
        complete_adapters()
        check_adapters()
    if by_request:
        from moe_nvfp4.integrations.vllm import lora as experts_with_lora

        experts_with_lora.install()
    if dense and layer.activation.value == "swigluoai":
        raise NotImplementedError(
            f"{name}: vLLM copies gpt-oss's bf16 experts past every loader: moe-nvfp4 quantize SRC DST, and serve DST"
        )
    if (backend := getattr(moe, "moe_backend", "auto")) != "auto":
        raise ValueError(
            f"{name}: --moe-backend {backend}: experts run on this library's kernels: leave it out, or --quantization"
        )
    if getattr(layer.expert_map_manager, "num_fused_shared_experts", 0):
        raise NotImplementedError(f"{name}: shared experts fused into the routed ones are not read (ROCm's AITER only)")
    if layer.apply_router_weight_on_input and moe.experts_per_token != 1:
        raise NotImplementedError(
            f"{name}: router weights on the input, with {moe.experts_per_token} experts per token: one row would need "
            "several weights"
        )
    if moe.intermediate_size_per_partition * moe.tp_size != moe.intermediate_size:
        raise ValueError(
            f"{name}: {moe.intermediate_size} channels are not a multiple of {moe.tp_size} ranks: choose another "
            "--tensor-parallel-size, or --enable-expert-parallel"
        )


def _refuse_modes(name: str) -> None:
    """NotImplementedError for what vLLM's own layers do and 4-bit ones do not: results that no other request changes,
    and weights that stay in the host's memory."""
    config = get_current_vllm_config()
    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        raise NotImplementedError(
            f"{name}: VLLM_BATCH_INVARIANT=1: kernels of 4-bit layers depend on how many tokens there are, and so does "
            "the last bit of a result: unset it, or serve the dense model"
        )
    offload = getattr(config, "offload_config", None)
    if offload is not None and (offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size):
        raise NotImplementedError(
            f"{name}: --cpu-offload-gb and --offload-group-size do not find 4-bit weights, which would stay on the "
            """GPU: leave them out, and keep experts on the CPU by --hf-overrides '{"moe_nvfp4": {"cpu_experts": N}}'"""
        )


def refuse_linear(name: str) -> None:
    """ValueError or NotImplementedError if vLLM is set up in a way that the 4-bit linear `name` does not support."""
    _refuse_modes(name)
    kernels = get_current_vllm_config().kernel_config
    chosen = {"--linear-backend": getattr(kernels, "linear_backend", "auto")}
    for form, backend in (getattr(kernels, "linear_backend_per_quant", None) or {}).items():
        if form.startswith("nvfp4"):
            chosen[f"--kernel-config linear_backend_per_quant {form}:"] = backend
    for option, backend in chosen.items():
        if backend != "auto":
            raise ValueError(
                f"{name}: {option} {backend}: 4-bit linears run on this library's kernels here: leave it out, or "
                """--hf-overrides '{"moe_nvfp4": {"linears": "vllm"}}'"""
            )


def chosen_by_request() -> bool:
    """Whether requests choose adapters of experts."""
    lora = get_current_vllm_config().lora_config
    targets = None if lora is None else lora.target_modules
    return lora is not None and (targets is None or any(name.split(".")[-1] == "experts" for name in targets))


def _refuse_by_request(layer: RoutedExperts, adapter: bool) -> None:
    """NotImplementedError or ValueError if requests cannot choose adapters of the experts of `layer`."""
    config, parallel, name = get_current_vllm_config(), layer.moe_config.moe_parallel_config, layer.layer_name
    others = "--lora-target-modules q_proj k_proj v_proj o_proj, for adapters of these"
    if version() < BY_REQUEST:
        raise NotImplementedError(
            f"{name}: in vLLM {vllm.__version__} requests cannot choose adapters of 4-bit experts: install vLLM 0.32; "
            f"or add {others}, and give all requests one of the experts by "
            """--hf-overrides '{"moe_nvfp4": {"adapter": "FOLDER"}}'"""
        )
    if adapter:
        raise ValueError(f"{name}: moe_nvfp4's adapter is for all requests, and --enable-lora lets each choose one: "
                         f"leave out the former, or add {others}")  # fmt: skip
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel:
        raise NotImplementedError(
            f"{name}: with data, context or sequence parallelism the experts see tokens of several ranks, and do not "
            f"know which adapters these chose: use --tensor-parallel-size only, or add {others}"
        )
    if config.parallel_config.use_ubatching:
        raise NotImplementedError(f"{name}: adapters of experts with --enable-dbo: leave it out, or add {others}")


def refuse_graphs(
    layer: RoutedExperts, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], experts: int
) -> None:
    """NotImplementedError if CUDA graphs cannot have the products of adapters with `experts` of these sizes."""
    config = get_current_vllm_config()
    if device.type != "cuda" or config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return
    groups = experts * (1 if config.lora_config is None else config.lora_config.max_loras)
    if "triton" in Device.of(device).packages and dtype != torch.float32 and groups <= named("portable").adds:
        return
    major = torch.cuda.get_device_capability(device)[0]
    if dtype != torch.bfloat16 or major not in (9, 10) or any(size % 8 for size in sizes):
        raise NotImplementedError(
            f"{layer.layer_name}: without Triton, in fp32, or with more than {named('portable').adds} adapters in all "
            f"slots of all experts, torch multiplies them (here {groups}), without waiting for the GPU, as CUDA graphs "
            "need, only in bf16, on compute capability 9.x and 10.x, with channels in multiples of 8; here are "
            f"{dtype}, {major}.x and {' and '.join(map(str, sizes))} channels: add --enforce-eager"
        )


def refuse_on_cpu(layer: RoutedExperts, device: torch.device, fused: bool, by_request: bool = False) -> None:
    """NotImplementedError if the experts of `layer` cannot stay on the CPU beside x on `device`.

    fused       whether its kernels compute the whole layer: else the host waits for the GPU, which CUDA graphs cannot
    by_request  whether requests choose adapters of it
    """
    config = get_current_vllm_config()
    if device.type != "cpu" and by_request:
        raise NotImplementedError(
            f"{layer.layer_name}: cpu_experts with adapters of experts, which are on the GPU: leave out cpu_experts, "
            "or add --lora-target-modules q_proj k_proj v_proj o_proj, for adapters of these"
        )
    if (ranks := config.parallel_config.world_size_across_dp) > 1:
        raise NotImplementedError(
            f"{layer.layer_name}: cpu_experts keeps whole experts beside one GPU, and this engine has {ranks} ranks: "
            "leave out cpu_experts, or the parallelism (one engine for each GPU)"
        )
    if device.type != "cpu" and not fused and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        raise NotImplementedError(
            f"{layer.layer_name}: cpu_experts with an adapter of experts, or a gate that the kernels do not have: "
            "the host then waits for the GPU at each layer, which CUDA graphs cannot: add --enforce-eager"
        )


def room(config: VllmConfig, moe: FusedMoEConfig, largest: int) -> tuple[int, dict[str, int]]:
    """What the GPU of this process has room for, once all weights but experts are there: the bytes that vLLM may use,
    and what takes them besides experts -> its bytes.

    largest  bytes of the largest layer's experts
    """
    tokens, vocabulary = config.scheduler_config.max_num_batched_tokens, config.model_config.get_vocab_size()
    requests = min(tokens, config.scheduler_config.max_num_seqs)
    rows = moe.hidden_dim + 3 * moe.intermediate_size_per_partition  # numbers of a token at one expert: y, gate, up, h
    step = 2 * tokens * moe.experts_per_token * rows + 3 * 4 * requests * vocabulary  # logits fp32, and their sampler's
    cache = config.cache_config.kv_cache_memory_bytes or _cache_bytes(config)
    memory = int(torch.cuda.mem_get_info()[1] * config.cache_config.gpu_memory_utilization)
    return memory, {
        "other weights": torch.cuda.memory_allocated(),
        f"a KV cache of {config.model_config.max_model_len} tokens": cache,
        f"scratch for {tokens} tokens at a time": SCRATCH - 2 * (COPIED - min(COPIED, largest)) + step,
    }


def _cache_bytes(config: VllmConfig) -> int:
    """Bytes that the KV cache must have for one request of the longest length."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    own = [layer for layer in layers if getattr(layer, "kv_sharing_target_layer_name", None) is None]
    specs = [spec for layer in own if (spec := layer.get_kv_cache_spec(config)) is not None]
    return sum(spec.max_memory_usage_bytes(config) for spec in specs)


def local_expert(layer: RoutedExperts, expert: int) -> int:
    """The index on this rank of the model's expert number `expert`; -1 if it is on another rank."""
    return layer._map_global_expert_id_to_local_expert_id(expert)


def experts_here(layer: RoutedExperts, count: int) -> list[int]:
    """The numbers of this rank's experts, which are `count`, in order."""
    places = {local_expert(layer, e): e for e in range(layer.moe_config.num_experts)}
    return [places[i] for i in range(count)]


def check_load_format(name: str, form: str | None, model: Model) -> None:
    """ValueError if vLLM's own loader would read the files of `model`, which are of another format, MXFP4 or FP8."""
    if form is None:
        return
    config = get_current_vllm_config()
    drafts = config.speculative_config
    # vLLM's "draft_model" is read as the target is, whatever its draft_load_config says
    own = drafts.draft_load_config if _drafts(model) and drafts.method != "draft_model" else None
    if (own or config.load_config).load_format in (NAME, "dummy"):
        return
    add = f"--load-format {NAME}"
    if own is not None:
        add = f"""`"draft_load_config": {{"load_format": "{NAME}"}}` to --speculative-config"""
    raise ValueError(f"{name}: the files are {form}, and become NVFP4 while they load: add {add}")


def headers(model: str, revision: str | None) -> Checkpoint | None:
    """`opened`, and for a name on the Hub the names, dtypes and shapes of its tensors, which vLLM reads from there or
    from what is downloaded; None where neither says them."""
    if os.path.isdir(model) or "://" in model or envs.VLLM_USE_MODELSCOPE:
        return opened(model)
    found = get_safetensors_params_metadata(model, revision=revision)
    found.pop("__metadata__", None)  # of files in the Hub's cache
    tensors = {n: TensorSlice(Path(model), t["dtype"], tuple(t["shape"]), 0, 0) for n, t in found.items()}
    return Checkpoint(Path(model), {}, tensors) if tensors else None


class UnwrittenLoader(DefaultModelLoader):
    """`--load-format moe_nvfp4`: vLLM's own loader, but files that the model's quantization config says are converted
    come as the conversion makes them."""

    def __init__(self, load_config: LoadConfig):
        super().__init__(dataclasses.replace(load_config, load_format="auto"))
        self.converted: Converted | None = None
        self.experts = True

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, *args, **kwargs) -> torch.nn.Module:
        config = vllm_config.quant_config
        if model_config.model != vllm_config.model_config.model:  # a draft model in a folder of its own
            config = vllm_config.get_quantization_config(model_config, self.load_config)
        elif model_config.runner_type != "draft" and (config is None or config.get_name() != NAME):
            raise ValueError(f"--load-format {NAME}: the model is not quantized by it: add --quantization {NAME}")
        self.converted = getattr(config, "converted", None)
        place = self.load_config.download_dir
        if self.converted is not None and place and not os.path.isdir(model_config.model):
            raise ValueError(
                f"--download-dir {place}: files that become NVFP4 are read from the Hub's own cache: leave it out "
                f"(HF_HOME names another disk), or hf download {model_config.model} --local-dir FOLDER, and serve that"
            )
        # vLLM's gpt-oss drops gate and up, so `ExpertLoader.read` takes all three
        self.experts = model_config.hf_text_config.model_type != "gpt_oss"
        return super().load_model(vllm_config, model_config, *args, **kwargs)

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, Tensor]]:
        if self.converted is None:
            yield from super()._get_weights_iterator(source)
            return
        for name, tensor in tensors(self.converted.open(), self.experts):
            yield source.prefix + name, tensor


def _drafts(model: Model) -> bool:
    """Whether `model` is the one for drafts: of another folder, or some layers of the same one."""
    drafts = get_current_vllm_config().speculative_config
    own = None if drafts is None else drafts.draft_model_config
    if own is None:
        return False
    found, target = (Model.of(c.model, c.hf_config) for c in (own, drafts.target_model_config))
    return found == model != target


def own_drafts() -> Any:
    """The config of those layers of the model's own folder that draft; None if none do."""
    drafts = get_current_vllm_config().speculative_config
    own = None if drafts is None else drafts.draft_model_config
    return own.hf_config if own is not None and own.model == drafts.target_model_config.model else None


def whole_and_dense(model: Model) -> tuple[bool, bool]:
    """Whether this process has all layers of `model`, and whether these are dense if vLLM finds no experts in them: its
    config counts none, or these are all layers, and not only some for drafts."""
    config = get_current_vllm_config()
    whole, drafts = config.parallel_config.pipeline_parallel_size == 1, _drafts(model)
    own = config.speculative_config.draft_model_config if drafts else config.model_config
    return whole, own.get_num_experts() == 0 or whole and not drafts


def current() -> VllmConfig:
    """The config of the engine whose model is being made."""
    return get_current_vllm_config()


def tell_apart(config: VllmConfig, name: str, form: Any) -> None:
    """Put the form of the layer `name`, which depends on its files, into the key of vLLM's cache of compiled code: that
    has the settings in it, and not the files, and the code is used without a look at what it was made for."""
    if isinstance(config.additional_config, dict):
        config.additional_config.setdefault(NAME, {})[name] = form


def stored_transposed() -> bool | None:
    """Whether transformers stores the experts of the model that is made as [E, in, out], and its class tells PEFT so
    (`is_transposed`); None: it does not tell, or stored them so in some version."""
    model_type = get_current_vllm_config().model_config.hf_text_config.model_type
    if model_type in ("gpt_oss", "openai_privacy_filter", "aria_text"):
        return True
    some = model_type == "dbrx" or model_type in STACKS and STACKS[model_type].transposed is not False
    return None if some else False


def model_class() -> str:
    return get_current_vllm_config().model_config.architecture


def log(text: str) -> None:
    """A line of vLLM's log."""
    init_logger("vllm.moe_nvfp4").info(text)


def has_fp4() -> bool:
    """Whether the GPU multiplies NVFP4 by NVFP4. Elsewhere vLLM's kernels for such linears take bf16 activations."""
    return current_platform.has_device_capability(100)
