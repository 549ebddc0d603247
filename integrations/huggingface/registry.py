"""What this package adds to transformers' registries, and every private part of transformers that it uses.

Importing `moe_nvfp4.integrations.huggingface` calls `register`; `unregister` undoes it. Both may be called
in any order and any number of times. An entry that another package made first is kept for files that are not NVFP4.

Entries of transformers.quantizers.auto
    AUTO_QUANTIZATION_CONFIG_MAPPING   "moe_nvfp4": ours. "modelopt", "compressed-tensors", "fp8", "mxfp4", "quark": a
                                       reader that takes a config.json that says NVFP4, and leaves any other to the
                                       entry from before, if there is one
    AUTO_QUANTIZER_MAPPING             "moe_nvfp4", which no other package and no file uses
    LOADING_ATTRIBUTES_CONFIG_TYPES    `MoeNvfp4Config` is added, so that one may be given for a quantized folder

A folder of another format (MXFP4, FP8) stays with its own reader, unless the user gives a `MoeNvfp4Config` for it:
transformers then sets the attributes of `get_loading_attributes` in the config that it has read, and one of them is the
quant_method, by which it chooses the quantizer. Before that it compares the names of the two configs' classes, so the
name of ours equals theirs while it is registered (`_Name`).

Entry of transformers.integrations.moe
    ALL_EXPERTS_FUNCTIONS              "moe_nvfp4", the experts implementation that a 4-bit model reports (experts.py)

Entry of transformers.integrations.finegrained, where there is one (no release has it yet)
    ALL_FINEGRAINED_EXPERTS_FUNCTIONS  "moe_nvfp4", for experts that transformers itself loaded (finegrained.py)

Entry of peft
    PEFT_TYPE_TO_TUNER_MAPPING         LORA, where PEFT 0.21 or newer is installed: a subclass of PEFT's own (peft.py)

Also used, though transformers does not document it (tested with 5.17 and 5.24, which have it unless noted)
    core_model_loading    WeightConverter and its _original_source_patterns, _original_target_patterns, _scoped_match,
                          scope_prefix, base_model_prefix, collected_tensors, layer_targets, _was_used,
                          materialize_tensors;
                          ConversionOps, MergeModulelist, Concatenate, Transpose, PrefixChange, WeightRenaming,
                          rename_source_key, build_glob_alternation
    conversion_mapping    get_model_conversion_mapping
    quantizers.base       HfQuantizer._process_model_before_weight_loading, _process_model_after_weight_loading,
                          dequantize, _dequantize, remove_quantization_config, update_weight_conversions (5.17 does not
                          pass the model), get_new_dtype, param_needs_quantization, param_element_size,
                          update_parallel_plan, get_quantize_ops, get_state_dict_and_metadata
    utils.import_utils    is_serve_available
    a model               _weight_conversions, hf_quantizer, is_quantized, quantization_method, _tp_plan, _ep_plan,
                          _tp_size, all_tied_weights_keys, _keys_to_ignore_on_load_missing,
                          _keys_to_ignore_on_load_unexpected, _can_compile_fullgraph, _get_dtype_plan;
                          get_compiled_call, which `use_cuda_graphs` replaces, and _get_resized_lm_head and
                          save_pretrained, which a 4-bit model has of its own
    a config              _experts_implementation, _experts_implementation_internal, _is_quantized
    an experts module     what `use_experts_implementation` gives it: _apply_gate, has_gate, has_bias, is_transposed,
                          is_concatenated; _hf_quantized_needs_local_tp and _is_expert_parallel (not in 5.17), which
                          are set
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_nvfp4.integrations.huggingface import finegrained
from moe_nvfp4.integrations.huggingface.config import ASKED, MoeNvfp4Config
from moe_nvfp4.integrations.huggingface.experts import IMPLEMENTATION, dense_forward
from moe_nvfp4.integrations.huggingface.quantizer import MoeNvfp4Quantizer
from moe_nvfp4.integrations.peft_versions import OLDEST, installed
from moe_nvfp4.quantize.dialects import DIALECTS, dialect_of_method, read_config
from moe_nvfp4.quantize.layouts import mxfp4
from moe_nvfp4.quantize.source import becomes_nvfp4

logger = logging.get_logger(__name__)
registries: Any = auto  # Any, because its annotations admit only transformers' own classes
# quant_method of files that may be NVFP4, or of a format that becomes NVFP4 while it loads
METHODS = [*(method for dialect in DIALECTS.values() for method in dialect.methods), "mxfp4", "quark"]
UNREAD = (
    "the files are quantized with {!r}, not with NVFP4: they become NVFP4 while they load with "
    "quantization_config=MoeNvfp4Config(), or once with moe-nvfp4 quantize SRC DST"
)
_before: dict[str, type | None] = {}  # the entries for METHODS that `register` found
_converts = [False]  # whether such formats become NVFP4 where no config is given


def register(convert: bool = False) -> None:
    """Have transformers read NVFP4 folders with this package, and accept a `MoeNvfp4Config` as an argument.

    convert: MXFP4 and FP8 folders become NVFP4 while they load as if the user gave a `MoeNvfp4Config()`, for programs
    that load a model without asking
    """
    _converts[0] = convert
    configs: dict[str, Any] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    configs["moe_nvfp4"] = MoeNvfp4Config
    auto.AUTO_QUANTIZER_MAPPING["moe_nvfp4"] = MoeNvfp4Quantizer
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = dense_forward
    finegrained.register()
    if MoeNvfp4Config not in registries.LOADING_ATTRIBUTES_CONFIG_TYPES:
        registries.LOADING_ATTRIBUTES_CONFIG_TYPES += OURS
    for method in METHODS:
        entry = configs.get(method)
        if not _is_ours(entry):
            _before[method] = entry
            configs[method] = _reader(method, entry)
    MoeNvfp4Config.__name__ = _Name(NAME, *(entry.__name__ for entry in _before.values() if entry is not None))
    if adapters := _adapters():
        adapters.register()


def unregister() -> None:
    """Remove what `register` added. Models that are loaded still run, and can be saved."""
    configs: dict[str, Any] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method, entry in _before.items():
        if _is_ours(configs.get(method)):  # else another package replaced our entry later, and may call it
            del configs[method]
            configs.update({} if entry is None else {method: entry})
    _before.clear()
    configs.pop("moe_nvfp4", None)
    auto.AUTO_QUANTIZER_MAPPING.pop("moe_nvfp4", None)
    ALL_EXPERTS_FUNCTIONS.pop(IMPLEMENTATION, None)
    finegrained.unregister()
    MoeNvfp4Config.__name__ = NAME
    others = tuple(t for t in registries.LOADING_ATTRIBUTES_CONFIG_TYPES if t not in OURS)
    registries.LOADING_ATTRIBUTES_CONFIG_TYPES = others
    if adapters := _adapters():
        adapters.unregister()


def _adapters() -> ModuleType | None:
    """The module for LoRA, if a PEFT that it knows is installed."""
    if (peft := installed()) is None or peft < OLDEST:
        return None
    return import_module("moe_nvfp4.integrations.huggingface.peft")


def _is_ours(entry: type | None) -> bool:
    return entry is MoeNvfp4Config or getattr(entry, "reads_nvfp4", False)


def _reader(method: str, theirs: Any) -> type:
    """An entry for `method` that reads NVFP4 configs itself and leaves others to `theirs`, if there is such an entry.

    transformers gets a config object from the entry, and the quantizer from the quant_method of that object. So this
    one entry decides, and no code of transformers is changed.
    """

    ours = MoeNvfp4Config if theirs is None else _as_either(theirs)

    class Reader(QuantizationConfigMixin):
        reads_nvfp4 = True

        @classmethod
        def from_dict(cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
            found = None
            if _converts[0] and (form := becomes_nvfp4(config_dict)):
                logger.warning(f"the files are {form}, and become NVFP4 while they load: moe-nvfp4 quantize SRC DST "
                               "writes them once")  # fmt: skip
                found = _unread(ours, ValueError(UNREAD.format(method)))
                setattr(found, ASKED, MoeNvfp4Config())
            elif theirs is None and mxfp4.describes(config_dict):
                found = _unread(ours, ValueError(UNREAD.format(method)))
            if found is not None:
                return (found, {}) if return_unused_kwargs else found
            nvfp4 = theirs is None or _is_nvfp4(method, config_dict)
            reader = ours if nvfp4 else _with_attributes(theirs)
            try:
                return reader.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)
            except ImportError as error:  # the package of this format, which reading it as NVFP4 does without
                if nvfp4 or not mxfp4.describes(config_dict):
                    raise
                found = _unread(ours, error)
                return (found, {}) if return_unused_kwargs else found

    return Reader


def _unread(ours: type[MoeNvfp4Config], error: Exception) -> MoeNvfp4Config:
    """The config of a folder that becomes NVFP4 if the user asks for it; else `error` is raised."""
    found = ours()
    found.unread = error
    return found


def _is_nvfp4(method: str, config: Mapping) -> bool:
    """Whether a config says NVFP4. ValueError for NVFP4 in a form that is not supported."""
    dialect = dialect_of_method(method)
    return dialect is not None and dialect.is_nvfp4(config) and read_config(config) is not None


class _Name(str):
    """A class name that also equals the names of other classes."""

    names: set[str]

    def __new__(cls, name: str, *also: str) -> _Name:
        self = super().__new__(cls, name)
        self.names = {name, *also}
        return self

    def __eq__(self, other: object) -> bool:
        return other in self.names

    def __ne__(self, other: object) -> bool:
        return other not in self.names

    __hash__ = str.__hash__


def _as_either(theirs: type) -> type[MoeNvfp4Config]:
    """A `MoeNvfp4Config` class for a folder of the method of `theirs`: users may pass a config of either class for it.

    transformers refuses a quantization_config whose class name differs from that of the class that read the folder.
    """
    config = type(NAME, (MoeNvfp4Config,), {"__reduce__": _copies_as(MoeNvfp4Config)})
    config.__name__ = _Name(NAME, theirs.__name__)
    return config


class _Attributes:
    """A base of configs in which transformers sets the attributes that a user's config asks for."""


def _with_attributes(theirs: Any) -> Any:
    """`theirs`; a subclass if transformers sets no attributes in it (Quark's). A copy is of `theirs` again."""
    if issubclass(theirs, registries.LOADING_ATTRIBUTES_CONFIG_TYPES):
        return theirs
    return type(theirs.__name__, (theirs, _Attributes), {"__reduce__": _copies_as(theirs)})


def _copies_as(config: type) -> Any:
    """`__reduce__` of a class that was made here, which pickle would look for in vain: a copy is of the class `config`.
    Some models (GraniteMoeSWA) copy their config into a module."""
    return lambda self: (object.__new__, (config,), vars(self))


NAME, OURS = "MoeNvfp4Config", (MoeNvfp4Config, _Attributes)
