"""The quantization config "moe_nvfp4": NVFP4 experts are ours, linears on CPUs and on Hopper, all else is vLLM's."""

from __future__ import annotations

import difflib
import os
import re
from functools import partial
from typing import Any, NamedTuple

import torch
import vllm
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moe_nvfp4.backends import Device, Problem, explain
from moe_nvfp4.integrations.placement import no_gpu
from moe_nvfp4.integrations.vllm import NAME
from moe_nvfp4.integrations.vllm.adapters import ExpertsAdapter
from moe_nvfp4.integrations.vllm.loading import NO_AWQ, check_files, dense_names, folder_of
from moe_nvfp4.integrations.vllm.placement import Placement
from moe_nvfp4.integrations.vllm.unwritten import Converted
from moe_nvfp4.quantize.dialects import QuantizationInfo, matches, read_config
from moe_nvfp4.quantize.files import Checkpoint
from moe_nvfp4.quantize.options import Options
from moe_nvfp4.quantize.recipes import DEFAULT_RECIPE, RECIPES
from moe_nvfp4.quantize.source import becomes_nvfp4
from moe_nvfp4.weights import ACTIVATIONS

VERSIONS = (0, 26), (0, 33)  # the oldest and the newest version whose interfaces were compared
ON_CPUS = (0, 30)  # the oldest that routes tokens there by itself: before, its own experts for CPUs did
# quant_method -> variants of vLLM's own reader of it, which handles everything but experts
READERS: dict[str, tuple[str, ...]] = {"modelopt": ("modelopt_mixed", "modelopt_fp4"), "compressed-tensors": ()}
# model types whose head is dense in vLLM, whatever the files have
DENSE_HEADS = ("gpt_oss", "jamba", "qwen3_next", "qwen4_exp_text", "step3_text", "phimoe", "ernie_mtp",
               "exaone_moe_mtp", "hy_v3_mtp", "mimo_v2_mtp")  # fmt: skip
# parts of vLLM's names of modules whose weights have another: Mamba in Granite 4, Falcon-H1 and Jamba; LFM2-VL; Param2;
# Ling 2.5
NAMES = ((".mixer.", ".mamba."), (".short_conv.", ".conv."), ("language.", "language_model."),
         (".self_attn.qkv_proj", ".attention.query_key_value"), (".self_attn.o_proj", ".attention.dense"),
         (".self_attn.", ".attention."))  # fmt: skip
VLLM = "vllm"
LINEARS = (NAME, VLLM)
FORM = "moe_nvfp4_from"  # the key that `convert` adds to a quantization_config, which vLLM may read again
OPTIONS = ("activations", "recipe", "exclude", "linears", "adapter", "cpu_experts")
VALUES = {"activations": ACTIVATIONS, "recipe": RECIPES, "linears": LINEARS}  # of the options that have few


def version() -> tuple[int, ...]:
    """vLLM's, of two numbers; () if it says none."""
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return tuple(map(int, found.groups())) if found else ()


def check_version() -> None:
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    oldest, newest = ON_CPUS if cpu else VERSIONS[0], VERSIONS[1]
    if not oldest <= version() <= newest:
        (a, b), (c, d) = oldest, newest
        raise ImportError(
            f"moe_nvfp4 runs in vLLM {a}.{b} to {c}.{d}{' on a CPU' * cpu}, this is vLLM {vllm.__version__}: install "
            "one of those, or another moe-nvfp4"
        )


class Model(NamedTuple):
    """What tells an engine's model from the one that drafts for it."""

    name: str  # its folder, or its name on the Hub
    classes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, hf_config: Any) -> Model:
        return cls(name, tuple(getattr(hf_config, "architectures", None) or ()))


class MoeNvfp4Config(QuantizationConfig):
    """How vLLM loads a model with this library's experts.

    base  vLLM's own config of NVFP4 files; None: the files are bf16. Their experts are quantized as they are loaded,
          and their linears stay as they are
    info  what the config of NVFP4 files says
    form  "MXFP4" or "FP8", of files that become NVFP4 while they load: `maybe_update_config` then sets base and info

    Options come from `moe_nvfp4` in the folder's quantization_config, or from the command line:
    `--hf-overrides '{"moe_nvfp4": {"activations": "nvfp4"}}'`.

    activations  "bf16" (W4A16), "nvfp4" or "nvfp4_four_over_six" (W4A4); default: what the files were made for, or
                 "bf16" for bf16 files
    recipe       how block scales are chosen when experts are quantized
    exclude      with files that are not NVFP4: names or wildcards of experts modules that stay as they are
    linears      with NVFP4 files: whose kernels run NVFP4 linears, "vllm" or "moe_nvfp4"; default: ours on a CPU,
                 where vLLM has none, and for W4A16 by the Hopper kernels, which are faster; else vLLM's
    adapter      a folder with a LoRA adapter of experts, which all requests get
    cpu_experts  layers whose experts stay in host memory beside a GPU, and are computed by the CPU: a number (the first
                 ones), "all", or "auto": as many as the GPU has no room for
    """

    def __init__(
        self, base: QuantizationConfig | None = None, info: QuantizationInfo | None = None, form: str | None = None
    ):
        check_version()
        super().__init__()
        self.base, self.info, self.form = base, info, form
        self.model = Model("", ())  # until vLLM says which
        self.converted: Converted | None = None
        self.ignore = [] if info is None else list(info.ignore)
        self.activations, self.recipe, self.exclude = None, DEFAULT_RECIPE, []
        self.linears: str | None = None
        self.adapter: ExpertsAdapter | None = None
        self.placement = Placement()
        self.dense: list[str] = []  # matrices that stay dense, as the files name them, if these are here
        self.static = True  # whether files for W4A4 have static activation scales; False: they are here, and have none
        self.experts: list[str] = []  # the experts modules that vLLM has asked about
        self.has_said = False  # how vLLM runs linears
        self.said: dict[str, Any] = {}  # what the model's config says of the experts' gate
        self.drafts = ""  # vLLM's name of a layer for drafts that files call otherwise
        if base is not None:
            self.packed_modules_mapping = base.packed_modules_mapping

    # ---- called first, in the process that the user started
    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict, user_quant: str | None, hf_config=None) -> str | None:
        """Take NVFP4 checkpoints where the user asks for it, and on a CPU, where vLLM has no NVFP4 experts."""
        from vllm.platforms import current_platform

        if user_quant != NAME and not (user_quant is None and current_platform.is_cpu()):
            return None
        try:  # unless the user asked for us, errors in other tools' configs are not ours to raise
            if user_quant == NAME and _becomes_nvfp4(hf_quant_cfg):
                check_version()
                return NAME
            info = _read(hf_quant_cfg) if hf_quant_cfg.get("quant_method") in READERS else None
        except (ValueError, KeyError, TypeError, AttributeError):
            if user_quant == NAME:
                raise
            return None
        if info is None and user_quant == NAME:
            raise ValueError(
                f"the checkpoint is quantized with {hf_quant_cfg.get('quant_method')!r}, --quantization {NAME} is for "
                "experts in NVFP4, MXFP4, FP8 (in blocks) and bf16: moe-nvfp4 quantize SRC DST makes a folder to serve "
                "of the original"
            )
        if info is None:
            return None
        check_version()
        return NAME

    @classmethod
    def from_config(cls, config: dict) -> MoeNvfp4Config:
        from moe_nvfp4.integrations.vllm import engine

        check_version()
        if form := _becomes_nvfp4(config):
            return cls(form=form)
        info = _read(config)
        if config.get("quant_method") not in READERS:
            raise ValueError(
                f"quant_method {config.get('quant_method')!r}: this builds on vLLM's readers of "
                f"{' and '.join(READERS)}. moe-nvfp4 quantize SRC DST writes either"
            )
        if info is not None and info.awq:
            raise NotImplementedError(f"quant_algo NVFP4_AWQ: {NO_AWQ}")
        result = cls(engine.base_config(config), info)
        own = config.get("moe_nvfp4") or {}
        return result.choose({key: own[key] for key in ("activations",) if key in own})

    def choose(self, options: dict[str, Any]) -> MoeNvfp4Config:
        """Set options. Returns self. ValueError for an unknown option or value."""
        if not isinstance(options, dict):
            raise ValueError(f'moe_nvfp4: {options!r}: options are an object, {{"activations": "nvfp4"}}')
        for key, value in options.items():
            if key == "exclude" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
                raise ValueError(f"moe_nvfp4: exclude={value!r}: it is a list of names or wildcards")
            if key == "adapter" and not isinstance(value, str):
                raise ValueError(f"moe_nvfp4: adapter={value!r}: it is the folder of one adapter")
            known = VALUES.get(key)
            if key not in OPTIONS or (known and value not in known):
                rule = f"{key} must be one of {', '.join(known)}" if known else f"options are {', '.join(OPTIONS)}"
                raise ValueError(f"moe_nvfp4: {key}={value!r}: {rule}")
            if self.base is None and key == "linears":
                raise ValueError(f"moe_nvfp4: linears={value!r}: the linears of these files are bf16, and stay so: "
                                 "moe-nvfp4 quantize SRC DST --linears all makes them 4-bit")  # fmt: skip
            if self.base is not None and key in ("recipe", "exclude"):
                raise ValueError(f"moe_nvfp4: {key}={value!r}: these experts are NVFP4 already; it is for bf16 folders")
            if key == "cpu_experts":
                self.placement = Placement(value)
            else:
                setattr(self, key, ExpertsAdapter(value) if key == "adapter" else value)
        return self

    def maybe_update_config(self, model_name: str, hf_config=None, revision: str | None = None) -> None:
        from vllm.platforms import current_platform

        from moe_nvfp4.integrations.vllm import engine

        self.model = Model.of(model_name, hf_config)
        _check_overrides(hf_config)
        if getattr(self, "online_quantization_config", None) is not None:  # vLLM sets it
            raise ValueError(
                f"--quantization-config: {NAME} quantizes no layers in other formats: leave it out, and make linears "
                "4-bit by moe-nvfp4 quantize SRC DST --linears all"
            )
        self.choose(told(hf_config))
        self.said = gate_settings(hf_config)
        if getattr(hf_config, "model_type", None) == "ernie4_5_moe":
            self.drafts = f"model.layers.{hf_config.num_hidden_layers}."
        if self.placement.wanted == "auto" and current_platform.is_cpu():
            raise no_gpu()
        if self.adapter is not None:
            self.adapter.check_layers(hf_config.get_text_config().num_hidden_layers)
        coming = None if self.form is None else self.convert(model_name, hf_config, revision)
        if self.base is not None:
            self.check_head(hf_config)
            self.base.maybe_update_config(model_name, hf_config=hf_config, revision=revision)
            if (source := coming or engine.headers(model_name, revision)) is not None:
                check_files(source, self.info, whole=coming is not None or os.path.isdir(model_name))
                self.dense = dense_names(source, self.info)
                self.static = any(name.endswith(f".{self.info.dialect.input_scale}") for name in source.tensors)
                if any(name.startswith("layers.") for name in source.tensors):  # a base model, vLLM's is in `model`
                    from vllm.model_executor.models.utils import WeightsMapper  # takes a second to import

                    self.rename(WeightsMapper(orig_to_new_prefix={"layers.": "model.layers."}))

    def convert(self, model_name: str, hf_config: Any, revision: str | None) -> Checkpoint:
        """Make this the config of the NVFP4 checkpoint that a conversion of the model's files would write, which is
        returned. Raises what a conversion does."""
        from moe_nvfp4.integrations.vllm import engine

        folder = folder_of(model_name, revision)
        options = Options(self.recipe, self.exclude, activations=self.activations or "bf16", device="cpu")
        self.converted = Converted(folder, options)
        coming = self.converted.open().checkpoint
        config = coming.config["quantization_config"]
        self.base, self.info, self.exclude = engine.base_config(config), _read(config), []
        self.ignore = list(self.info.ignore)
        self.base.packed_modules_mapping = self.packed_modules_mapping
        hf_config.quantization_config = {**config, FORM: self.form}  # vLLM's gpt-oss chooses its way to load by it
        return coming

    def check_head(self, hf_config: Any) -> None:
        """NotImplementedError for a 4-bit head in a model of vLLM's that cannot have one."""
        text = hf_config.get_text_config()
        model_type = text.model_type
        packed = any(name.endswith("lm_head") for name in self.info.layers or ())
        packed |= self.info.whole and not self.info.ignores("lm_head")
        dense = model_type in DENSE_HEADS
        dense |= model_type == "cohere2_moe" and not text.tie_word_embeddings  # it takes the embedding
        # its loader passes over the names of codes that dense files do not have
        dense |= model_type == "glm4_moe_mtp" and self.info.dialect.weight == "weight"
        if packed and (dense or getattr(text, "norm_head", False)):
            or_else = "serve with transformers (moe-nvfp4 serve MODEL --engine transformers)"
            if model_type.endswith("_mtp"):
                or_else = "leave out the drafts (--speculative-config)"
            raise NotImplementedError(
                f"lm_head is 4-bit in the files, and vLLM's {model_type} has a dense one only: quantize with --linears "
                f"attention, or {or_else}"
            )
        if packed and getattr(text, "classifier_from_token", None) and not text.tie_word_embeddings:
            raise NotImplementedError(
                "classifier_from_token: vLLM makes a classifier of rows of a dense lm_head, and here it is 4-bit: "
                "quantize with --linears attention"
            )

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    # ---- called for each layer
    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from moe_nvfp4.integrations.vllm import engine, mends
        from moe_nvfp4.integrations.vllm.arrived import check_loads
        from moe_nvfp4.integrations.vllm.hidden import show_what_is_hidden
        from moe_nvfp4.integrations.vllm.linear import NVFP4LinearMethod
        from moe_nvfp4.integrations.vllm.method import DenseLinearMethod, MoeNvfp4Method

        mends.complete()
        check_loads()
        show_what_is_hidden()
        prefix = prefix.removeprefix("draft_model.")  # a draft model's prefix, which ignore lists do not have
        if isinstance(layer, ParallelLMHead):
            prefix = prefix or "lm_head"  # some of vLLM's models give no name (EXAONE, AFMoE)
        if not isinstance(layer, RoutedExperts):
            if isinstance(layer, LinearBase) and self.base is None:
                return DenseLinearMethod(prefix, partial(self.check_effect, *engine.whole_and_dense(self.model)))
            # vLLM's ModelOpt reader compares wildcards with fused names only: "*.q_proj" does not exclude "qkv_proj"
            if isinstance(layer, LinearBase | ParallelLMHead) and self.ignores(prefix):
                return DenseLinearMethod(prefix) if isinstance(layer, LinearBase) else None
            if isinstance(layer, LinearBase | ParallelLMHead) and self.info is not None:
                activations = engine.linear_activations(self.base, prefix, self.info.activations)
                runs = activations and (self.activations or activations)
                if runs and self.runs_linears(runs):
                    engine.refuse_linear(prefix)
                    return NVFP4LinearMethod(prefix, self.info.dialect, runs, self.static and activations == "nvfp4")
                if runs:
                    self.say(runs, activations if engine.has_fp4() else "bf16")
            return None if self.base is None else self.base.get_quant_method(layer, prefix)
        engine.check_load_format(prefix, self.form, self.model)
        if self.base is not None and not self.experts and (drafts := engine.own_drafts()) is not None:
            self.check_head(drafts)
        self.experts.append(prefix)
        activations: str | None = self.activations or "bf16"
        if self.base is None:
            theirs = any(matches(pattern, prefix) for pattern in self.exclude)
        else:
            activations = engine.activations_of(self.base, layer, prefix, self.info.activations, self.activations)
            theirs = self.ignores(prefix) or activations is None
        if theirs and self.adapter is not None and self.adapter.changes(prefix):
            raise NotImplementedError(
                f"{prefix} is not 4-bit here, and the adapter changes it: quantize it as well, or serve with "
                "transformers (PEFT)"
            )
        if not theirs:
            dialect = None if self.base is None else self.info.dialect
            runs = self.activations or activations
            files = self.converted or (self.model.name if os.path.isdir(self.model.name) else None)
            method = MoeNvfp4Method(layer, dialect, runs, self.recipe, self.adapter, self.placement, files, self.said)
            method.static = self.static and dialect is not None and activations == "nvfp4"
            return method
        if self.base is None or self.ignores(prefix):
            return None  # vLLM runs them unquantized
        return self.base.get_quant_method(layer, prefix)

    def runs_linears(self, activations: str) -> bool:
        """Whether NVFP4 linears with such activations are ours to run."""
        if self.linears is not None:
            return self.linears == NAME
        device = torch.get_default_device()
        if device.type in ("cpu", "meta"):  # the latter is of a tower that is left out (--language-model-only)
            return True
        problem = Problem("linear", 1, 128, 128, "raw", activations, torch.get_default_dtype())
        return activations == "bf16" and explain(problem, Device.of(device)).backend.name == "sm90"

    def say(self, wanted: str, theirs: str) -> None:
        """Say once that vLLM's kernels run 4-bit linears with other activations than the folder or the user wants."""
        from moe_nvfp4.integrations.vllm import engine

        if theirs != wanted and not self.has_said:
            self.has_said = True
            engine.log(
                f"4-bit linears run on vLLM's kernels, with {theirs} activations, and {wanted} ones were asked for "
                """(experts have these): --hf-overrides '{"moe_nvfp4": {"linears": "moe_nvfp4"}}' has linears run so"""
            )

    def check_effect(self, whole: bool, dense: bool) -> None:
        """ValueError if the model has no experts, or if a pattern of `exclude` matches none of them. Called when all
        modules of the model have been made.

        whole  whether this process has all layers
        dense  whether a model without experts here is dense, and no layer for drafts
        """
        if dense and not self.experts:
            raise ValueError(
                f"--quantization {NAME}: in vLLM this model has no experts, or runs them by other code than its MoE "
                "layer (MiniCPM, Nomic; gpt-oss with --model-impl transformers), and its linears stay: leave it out, "
                "or --model-impl"
            )
        useless = [p for p in self.exclude if not any(matches(p, name) for name in self.experts)]
        if whole and useless:
            raise ValueError(
                f"moe_nvfp4: exclude={useless!r} matches no experts module; in vLLM this model has "
                f"{', '.join(self.experts[:3])}" + (", ..." if len(self.experts) > 3 else "")
            )

    def ignores(self, prefix: str) -> bool:
        """Whether the config's ignore list matches a module of vLLM, or all the modules that are fused into it."""
        if any(new in prefix and self.ignores(prefix.replace(new, name)) for new, name in NAMES):
            return True
        # NVIDIA's files of Qwen3-Next and Qwen3.5 have it in bf16 and on no list, which those models of vLLM know
        if prefix == "mtp.fc" and self.base is not None and self.base.get_name() == "modelopt_fp4":
            return True
        if self.drafts and prefix.startswith(self.drafts):
            prefix = prefix.replace(self.drafts, "model.mtp_block.0.")
        head, _, last = prefix.rpartition(".")
        parts = [f"{head}.{part}" for part in self.packed_modules_mapping.get(last, ())]
        # vLLM's Aria gives shared experts no name but the last one
        names = [] if head else self.dense
        named = lambda module: any(matches(p, module) for p in self.ignore) or any(n.endswith(module) for n in names)
        return named(prefix) or bool(parts) and all(map(named, parts))

    def __getattr__(self, name: str) -> Any:
        """What vLLM asks its own config of these files, as by `kv_cache_scheme`."""
        base = vars(self).get("base")
        if base is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(base, name)

    # ---- set by models, and passed on to the base
    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        return self._packed

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self._packed = mapping
        if getattr(self, "base", None) is not None:
            self.base.packed_modules_mapping = mapping

    def apply_vllm_mapper(self, mapper) -> None:
        from moe_nvfp4.integrations.vllm import mends

        mends.complete()  # of a model of transformers, which vLLM changes before it asks about a layer
        self.rename(mapper)

    def rename(self, mapper) -> None:
        """Know the modules that the config and the files name by the names that `mapper` makes of these, too."""
        from moe_nvfp4.integrations.vllm import engine

        if self.base is not None:
            self.ignore += engine.renamed(self.base, mapper)
            # vLLM translates names, not expressions, which compressed-tensors' lists consist of; and some by a prefix
            # that ends in a dot, as that of a head, which files do not have if it is the embedding
            heads = ["lm_head"] * self.info.ignores("lm_head")
            names = mapper.apply_list([f"{name}.weight" for name in [*self.dense, *heads]])
            self.ignore += [name.removesuffix(".weight") for name in names]


def told(hf_config: Any) -> dict[str, Any]:
    """The options in --hf-overrides."""
    return getattr(hf_config, NAME, None) or {}


def check_options() -> None:
    """Have vLLM refuse options in --hf-overrides of a model that this does not quantize: it asks no quantization config
    about files that say nothing of one."""
    from vllm.config import ModelConfig

    verify = ModelConfig._verify_quantization
    if hasattr(verify, "extended"):
        return

    def verify_quantization(self) -> None:
        verify(self)
        # vLLM passes a function of overrides on to a draft model, too
        if told(self.hf_config) and self.quantization != NAME and self.runner != "draft":
            raise ValueError(f"--hf-overrides has options of {NAME}, which does not run: add --quantization {NAME}")

    verify_quantization.extended = True
    ModelConfig._verify_quantization = verify_quantization


def gate_settings(hf_config: Any) -> dict[str, Any]:
    """What a model's config says of its experts' gate, under gpt-oss's names."""
    text = None if hf_config is None else hf_config.get_text_config()
    found = {key: getattr(text, key, None) for key in ("swiglu_alpha", "swiglu_limit")}
    acts = (getattr(text, key, None) for key in ("mlp_hidden_act", "hidden_act", "hidden_activation"))
    return found | {"hidden_act": next(filter(None, acts), None)}


def _check_overrides(hf_config: Any) -> None:
    """ValueError for options in another place of --hf-overrides, which transformers takes for one of the model's."""
    if hf_config is None:
        return
    text = hf_config.get_text_config()
    for place, config in [("", hf_config)] + [("text_config.", text)] * (text is not hf_config):
        said = vars(config)
        other = [key for key in difflib.get_close_matches(NAME, said, cutoff=0.8) if key != NAME or place]
        # a model's own key of that name has other values
        other += [key for key in said if said[key] in tuple(VALUES.get(key, ())) or key == "cpu_experts"]
        if other:
            raise ValueError(
                f"--hf-overrides: {place + other[0]!r} is not an option of {NAME}: these go under its name, "
                f"""'{{"{NAME}": {{"activations": "nvfp4"}}}}'"""
            )


def _becomes_nvfp4(config: dict) -> str | None:
    """MXFP4 or FP8, if what vLLM passes as `quantization_config` says so, in a form that a conversion reads."""
    if FORM in config:
        return config[FORM]
    # vLLM renames the methods of gpt-oss and of DeepSeek V4
    method = re.sub("^(gpt_oss|deepseek_v4)_", "", str(config.get("quant_method")))
    return becomes_nvfp4({**config, "quant_method": method})


def _read(config: dict) -> QuantizationInfo | None:
    """Read what vLLM passes as `quantization_config`: config.json's, or the whole of hf_quant_config.json."""
    return read_config({"quantization_config": config}, config if "quantization" in config else None)
