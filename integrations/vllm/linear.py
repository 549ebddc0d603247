"""One linear of vLLM, or its head, with NVFP4 weights: vLLM's loaders fill parameters, and `NVFP4Linear` computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from moe_nvfp4.integrations.vllm import engine, reload
from moe_nvfp4.integrations.vllm.hidden import hide, refuse_saving
from moe_nvfp4.integrations.vllm.loading import CAST, DTYPES, OUTSIDE, check_rows, refresh
from moe_nvfp4.linear import NVFP4Linear
from moe_nvfp4.quantize.dialects import Dialect
from moe_nvfp4.ready import prepare
from moe_nvfp4.weights import check_block_scales, check_global_scale, is_quantized

PER_ELEMENT = {"weight": 2, "sf": 16}  # columns of the matrix in one element of a row


@register_weight_loader_v2_supported_method
class NVFP4LinearMethod(LinearMethodBase):
    """A linear of NVFP4 files in `dialect`, or several that vLLM fuses into one: q, k and v; gate and up.

    Those with equal scales become one `NVFP4Linear`, others one each. (vLLM's own kernels use one scale for all.)

    name         of vLLM's module, for messages
    activations  "bf16", "nvfp4" or "nvfp4_four_over_six"
    static       whether the files have static activation scales
    """

    def __init__(self, name: str, dialect: Dialect, activations: str, static: bool = False):
        super().__init__()
        self.name, self.dialect = name, dialect
        self.dummy = False  # whether vLLM reads no files (`arrived.check_loads`)
        self.static = static
        # vLLM multiplies MLA's kv_b_proj by the identity, to have its weights, and some rows by these: no activations
        self.activations = "bf16" if name.endswith(".kv_b_proj") else activations

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., Any],
        **extra_weight_attrs: Any,
    ) -> None:
        K, N, matrices = input_size_per_partition, sum(output_partition_sizes), len(output_partition_sizes)
        if K % 16:
            raise ValueError(
                f"{self.name}: a rank has {K} of {input_size} columns, which is not a multiple of 16, the NVFP4 block: "
                "choose another --tensor-parallel-size"
            )
        if type(layer) is ColumnParallelLinear and self.name.endswith(".in_proj") and layer.tp_size > 1:
            raise NotImplementedError(
                f"{self.name}: vLLM splits a Mamba layer of one group over ranks by a loader for a dense linear: serve "
                "with one rank, or quantize the original without this linear (--exclude)"
            )
        layer.input_size_per_partition = K
        self.sizes, self.columns, self.whole = list(output_partition_sizes), input_size, K == input_size
        self.ranks, self.dtype, self.config = getattr(layer, "tp_size", 1), params_dtype, engine.current()
        self.came: dict[str, set] = {}  # kind -> those of the fused linears whose tensors have come; None: all in one

        def attributes(kind: str) -> dict[str, Any]:
            return {"weight_loader": self._loader(kind, weight_loader)}

        rows, d = {"input_dim": 1, "output_dim": 0}, self.dialect
        codes = torch.empty(N, K // PER_ELEMENT["weight"], dtype=DTYPES["weight"])
        sf = torch.empty(N, K // PER_ELEMENT["sf"], dtype=DTYPES["sf"])
        layer.register_parameter(d.weight, ModelWeightParameter(data=codes, **rows, **attributes("weight")))
        layer.register_parameter(d.sf, GroupQuantScaleParameter(data=sf, **rows, **attributes("sf")))
        for kind in ("global_scale", "input_scale"):
            scales = torch.empty(matrices, dtype=torch.float32)
            parameter = PerTensorScaleParameter(data=scales, **attributes(kind))
            reload.awaits(parameter, matrices * (kind == "global_scale" or is_quantized(self.activations)))
            layer.register_parameter(getattr(d, kind), parameter)

    def _loader(self, kind: str, weight_loader: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's loader, which knows where rows and columns go, after a look at what it is given."""
        last = getattr(self.dialect, kind)

        def load(param: nn.Parameter, loaded_weight: Tensor, loaded_shard_id: Any = None) -> Any:
            shards = loaded_shard_id if isinstance(loaded_shard_id, tuple) else (loaded_shard_id,)
            where = f"{self.name}: {last}" + "".join(f" of {shard}" for shard in shards if shard is not None)
            found = f"{loaded_weight.dtype} {list(loaded_weight.shape)}"
            if kind in DTYPES and loaded_weight.dtype != DTYPES[kind]:
                raise ValueError(
                    f"{where} is {found}, expected {DTYPES[kind]}: the config calls this linear NVFP4. If it is not, "
                    "name it in the config's ignore list, or quantize the checkpoint again"
                )
            if kind not in DTYPES and loaded_weight.dtype != torch.float32:
                raise ValueError(f"{where} is {found}, expected float32{CAST}")
            if kind in DTYPES and loaded_weight.shape[-1] * PER_ELEMENT[kind] != self.columns:
                raise ValueError(f"{where} is {found}, the model's config needs {self.columns} columns: config.json "
                                 "and the weights are not of one model")  # fmt: skip
            if kind in DTYPES:
                check_rows(where, loaded_weight, self.sizes, loaded_shard_id, self.ranks)
            self.came.setdefault(kind, set()).update(shards)
            given = (param, loaded_weight) if loaded_shard_id is None else (param, loaded_weight, loaded_shard_id)
            return weight_loader(*given)

        return load

    def begin(self) -> None:
        """Be ready for all weights once more."""
        self.came = {}

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if layer.get_parameter(self.dialect.weight).is_meta:  # the head, where vLLM's model pools and has none
            return
        found: dict[str, Tensor] = {}
        for kind in ("weight", "sf", "global_scale", "input_scale"):
            last = getattr(self.dialect, kind)
            found[kind] = layer.get_parameter(last).data
            delattr(layer, last)
        again = hasattr(layer, "nvfp4")
        if self.dummy and not again:
            _randomize(found, self.static)
        else:
            self._check(found)
        made = self._made(found, engine.added_bias(layer))
        for linear in made:
            prepare(linear, dtype=self.dtype)
        engine.tell_apart(
            self.config, self.name, [(linear.out_features, linear.input_scale is None) for linear in made]
        )
        if again:
            refresh(nn.ModuleList(layer.nvfp4), nn.ModuleList(made), self.name)
        else:
            hide(layer, made)
            refuse_saving(layer, self.name)
        layer.weight = layer.nvfp4[0].weight  # whose device and dtype LoRA, MLA and some models ask for
        layer.weight.weight_loader = self._refuse

    def _refuse(self, param: nn.Parameter, loaded_weight: Tensor, *shard: Any) -> None:
        raise NotImplementedError(f"{self.name}.weight {OUTSIDE}")

    def _check(self, found: dict[str, Tensor]) -> None:
        """ValueError if a tensor has not come, or is not valid. Makes global scales the numbers that multiply."""
        d = self.dialect
        static = is_quantized(self.activations) and "input_scale" in self.came
        for kind in ("weight", "sf", "global_scale", "input_scale")[: 4 if static else 3]:
            came = self.came.get(kind, set())
            if None not in came and len(came) < len(self.sizes):
                of = f" (of {len(self.sizes)} fused linears: {', '.join(sorted(map(str, came)))})" if came else ""
                raise ValueError(
                    f"{self.name}: {getattr(d, kind)} did not come from the files{of}: the checkpoint is incomplete, "
                    "or this linear is dense and the config's ignore list does not name it. moe-nvfp4 verify FOLDER "
                    "tells which"
                )
        check_block_scales(found["sf"].view(torch.uint8), f"{self.name}.{d.sf}")
        found["global_scale"] = d.decode_scale(found["global_scale"])
        check_global_scale(found["global_scale"], f"{self.name}.{d.global_scale}")
        if static:
            found["input_scale"] = d.decode_scale(found["input_scale"])
            check_global_scale(found["input_scale"], f"{self.name}.{d.input_scale}")
        else:
            found["input_scale"].fill_(torch.nan)
        if is_quantized(self.activations) and not static and not self.whole:
            raise NotImplementedError(
                f"{self.name}: W4A4 without a static scale, with rows split over ranks: a row's scale would belong to "
                "a part of it. Add scales (moe-nvfp4 calibrate), serve with one rank, or with "
                """--hf-overrides '{"moe_nvfp4": {"activations": "bf16"}}'"""
            )
        self.came = {}

    def _made(self, found: dict[str, Tensor], bias: Tensor | None) -> list[NVFP4Linear]:
        """The linears, in order."""
        scales = torch.stack([found["global_scale"], found["input_scale"]]).T.nan_to_num(0.0)  # 0: no static scale
        made, start = [], 0
        for i, (scale, input_scale) in enumerate(scales):
            if i + 1 < len(scales) and torch.equal(scales[i], scales[i + 1]):
                continue
            rows = slice(start, sum(self.sizes[: i + 1]))
            start = rows.stop
            static = is_quantized(self.activations) and input_scale > 0
            parameters = {
                "weight": found["weight"][rows],
                "weight_sf": found["sf"][rows].view(torch.uint8),
                "weight_global_scale": scale.reshape(1),
            }
            parameters |= {"input_scale": input_scale.reshape(1)} if static else {}
            parameters |= {} if bias is None else {"bias": bias[rows]}
            K = 2 * parameters["weight"].shape[1]
            linear = NVFP4Linear(K, rows.stop - rows.start, None, self.activations, device="meta")
            for name, tensor in parameters.items():
                linear.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            made.append(linear)
        return made

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        raise NotImplementedError(
            f"{self.name} is 4-bit in the files, and vLLM's model takes the embedding for it: quantize with --exclude "
            f"{self.name}, or serve with transformers (moe-nvfp4 serve MODEL --engine transformers)"
        )

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        parts = [linear(x) for linear in layer.nvfp4]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if layer.nvfp4[0].bias is not None:
            assert bias is not None
            return y  # it is added before y is rounded
        return y if bias is None else y + bias


def _randomize(found: dict[str, Tensor], static: bool) -> None:
    """Fill in weights as for experts."""
    found["weight"].random_(0, 256)
    found["sf"].view(torch.uint8).fill_(0x38)
    found["global_scale"].fill_(1 / 256)
    found["input_scale"].fill_(1 / 256 if static else torch.nan)
