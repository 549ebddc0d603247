"""Tensor and expert parallelism: two gloo processes generate the same tokens as one."""

import json
from inspect import signature

import pytest
import torch
import transformers
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from moe_nvfp4.integrations.huggingface import MoeNvfp4Config, swap_experts
from moe_nvfp4.integrations.huggingface.experts import HFExperts
from moe_nvfp4.integrations.huggingface.packed import check_sharding
from tests.common import on_two_gpus, processes, relative_error
from tests.folders import is_expert, is_linear, quantized
from tests.models import IDS, SMALL, folder, gpt_oss, llama4, load, logits, make, same_tensors

pytestmark = pytest.mark.slow

WORKER = """
import contextlib, json, sys
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from moe_nvfp4.integrations.huggingface import MoeNvfp4Config
from tests.common import stand_for_hopper

torch.distributed.init_process_group(sys.argv[3])
rest = contextlib.ExitStack()  # of the process
ids = torch.tensor(json.loads(sys.argv[1]))
if sys.argv[3] == "nccl":
    torch.cuda.set_device(torch.distributed.get_rank())
    ids = ids.cuda()
for run in json.loads(sys.argv[2]):  # one start of the interpreter serves all runs
    if run["hopper"] and sys.argv[3] == "gloo":
        rest.enter_context(stand_for_hopper())
    kwargs = {} if run["fields"] is None else dict(quantization_config=MoeNvfp4Config(**run["fields"]))
    kwargs |= dict(dtype=torch.bfloat16 if run["hopper"] else torch.float32)
    mode = DistributedConfig(**run["mode"])
    if run["refused"]:
        try:
            model = AutoModelForCausalLM.from_pretrained(run["source"], distributed_config=mode, **kwargs)
            model.save_pretrained(run["out"])
        except (NotImplementedError, ValueError) as error:
            print(error, file=open(f"{run['out']} rank {torch.distributed.get_rank()}", "w"))
        continue
    model = AutoModelForCausalLM.from_pretrained(run["source"], distributed_config=mode, **kwargs).eval()
    experts = model.model.layers[0].mlp.experts
    local = {n: list(getattr(p, "to_local", lambda p=p: p)().shape) for n, p in experts.named_parameters()}
    with torch.no_grad():
        logits = model(ids).logits
    packed = [bool(block.mlp.experts.packed) for block in model.model.layers]
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.save_pretrained(run["out"])
    if torch.distributed.get_rank() == 0:
        result = dict(logits=logits.cpu(), tokens=tokens.cpu(), local=local, packed=packed)
        torch.save(result, run["out"] + "/result.pt")
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

SOURCES = [("bf16", False), ("nvfp4", False), ("nvfp4", True)]  # from then on the CPU stands for a Hopper GPU
W4A4 = ("nvfp4", "nvfp4_four_over_six")
MODES = {"tp": dict(tp_size=2), "fsdp": dict(fsdp_size=2)}
FIELDS = signature(DistributedConfig).parameters
MODES["ep all-reduce"] = dict(
    tp_size=2, **(dict(ep_size=2) if "ep_size" in FIELDS else dict(enable_expert_parallel=True))
)
if "ep_implementation" in FIELDS:
    MODES["ep all-to-all"] = dict(tp_size=2, ep_size=2, ep_implementation="all_to_all")
FOUR_RANKS = {"fsdp and tp": dict(fsdp_size=2, tp_size=2)}
STAGES = {"pp": dict(pp_size=2)}


def launch(tmp_path, runs, backend="gloo", ranks=2):
    """Start processes that do all `runs`; returns their exit codes and outputs."""
    return processes(ranks, tmp_path, WORKER, json.dumps(IDS.tolist()), json.dumps(runs), backend)


def qwen(intermediate=64):
    config = Qwen3MoeConfig(**SMALL, intermediate_size=96, moe_intermediate_size=intermediate, num_experts=8,
                            num_experts_per_tok=2)  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def a_run(source, out, mode, fields=None, hopper=False, refused=False):
    """What a worker is told. fields: of a `MoeNvfp4Config`, None: without one; hopper: run in bf16 on Hopper GPUs, or
    on a CPU that stands for one; refused: write down the error."""
    modes = dict(mode=(MODES | FOUR_RANKS | STAGES)[mode], fields=fields, hopper=hopper, refused=refused)
    return dict(source=str(source), out=str(out), **modes)


def one_process(source, out, dtype=torch.float32, **fields):
    """Quantize and save in one process -> folder, logits, tokens."""
    model = load(source, dtype, quantization_config=MoeNvfp4Config(**fields))
    model.save_pretrained(out)
    return out, logits(model), model.generate(IDS, max_new_tokens=8, do_sample=False)


def cut_blocks(path):
    make(lambda: qwen(intermediate=48)).save_pretrained(path / "bf16")
    return path / "bf16"


def dense(path):
    make(qwen).save_pretrained(path / "bf16")
    return path / "bf16"


def linears_too(path):
    return quantized(path, qwen, "modelopt", lambda k: is_expert(k) or is_linear(k))[0]


def scales_of_others(path):
    return quantized(path, qwen, "compressed-tensors")[0]


def experts_only(path):
    return quantized(path, qwen, "modelopt")[0]


# what is loaded, how it is split, fields of the config, the error
IN_FILES = "map_files keeps whole experts beside one GPU, and this model is split over ranks"
REFUSED = {
    "cut blocks": (cut_blocks, "tp", {}, "does not split over 2 ranks into whole blocks of 16"),
    "linears too": (linears_too, "tp", None, "quantized linears are not split over ranks yet"),
    "linears while loading": (dense, "tp", {"linears": "attention"}, "quantized linears are not split over ranks yet"),
    "scales of others": (
        scales_of_others, "ep all-reduce", None,
        "compressed-tensors's scales cannot be split over ranks as they are read",
    ),
    "layers in files": (linears_too, "pp", None, "quantized linears are not split over ranks yet"),
    "layers to be saved": (experts_only, "pp", None, "each rank has some layers of this model (pp_size=2)"),
    "channels in files": (experts_only, "tp", {"map_files": True, "cpu_experts": 1}, IN_FILES),
    "experts in files": (experts_only, "ep all-reduce", {"map_files": True}, IN_FILES),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder, and {hopper: what one process says}; two say it in every mode from bf16 and from 4-bit files, after
    they refused REFUSED."""
    path = tmp_path_factory.mktemp("distributed")
    make(qwen).save_pretrained(path / "bf16")
    one = {
        False: one_process(path / "bf16", path / "nvfp4"),
        True: one_process(path / "bf16", path / "nvfp4 and bf16", torch.bfloat16),
    }
    runs = [
        a_run(path / source, path / f"{mode}-{source}-{hopper}", mode, {} if source == "bf16" else None, hopper)
        for source, hopper in SOURCES
        for mode in MODES
    ]
    refused = [
        a_run(source(path / name), path / name, mode, fields, refused=True)
        for name, (source, mode, fields, _) in REFUSED.items()
    ]
    for name in W4A4:
        one[name] = one_process(path / "bf16", path / f"W4A4 {name}", activations=name)
    quantized_h = [a_run(path / f"W4A4 {name}", path / f"tp-{name}", "tp") for name in W4A4]
    codes, outputs = launch(path, refused + quantized_h + runs)
    assert codes == [0, 0], "\n".join(o[-3000:] for o in outputs)
    return path, one


@pytest.mark.parametrize("source, hopper", SOURCES)
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_equal_one(mode, source, hopper, results):
    """With `hopper` each rank packs its part in place, and saved files still have the same bytes. FSDP2 brings whole
    weights for each call, as it got them."""
    path, one = results
    saved, (expected, logits, tokens) = path / f"{mode}-{source}-{hopper}", one[hopper]
    result = torch.load(saved / "result.pt")
    assert result["packed"] == [hopper and mode != "fsdp"] * 2
    if hopper:  # in bf16
        assert relative_error(result["logits"], logits) < 0.05
    else:
        assert result["local"]["gate_up_proj"] == ([8, 64, 32] if mode == "tp" else [4, 128, 32])
        assert result["local"]["down_proj_sf"] == ([8, 64, 2] if mode == "tp" else [4, 64, 4])
        assert torch.equal(result["tokens"], tokens)
        torch.testing.assert_close(result["logits"], logits, rtol=1e-4, atol=1e-4)
    same_tensors(expected, saved)


@pytest.mark.parametrize("activations", W4A4)
def test_rows_quantized_by_ranks_have_the_scale_of_the_whole_row(activations, results):
    """By the scales of their own parts the logits were 6 and 8 % off."""
    path, one = results
    _, logits, tokens = one[activations]
    result = torch.load(path / f"tp-{activations}" / "result.pt")
    assert torch.equal(result["tokens"], tokens) and relative_error(result["logits"], logits) < 1e-5


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="transformers 5.17 loads no model so, a dense one neither (IndexError)",
)
def test_experts_of_which_ranks_have_some_and_a_part(tmp_path):
    """FSDP gives two of four ranks half of the experts, of which tensor parallelism gives each a part. Global scales
    come from the ranks that share an expert, whether files have experts one by one or in stacks; of stacks they once
    came from all four, and logits were 15 % off."""
    model = make(qwen)
    model.save_pretrained(tmp_path / "one by one")
    model.save_pretrained(tmp_path / "stacks", save_original_format=False)
    expected, logits, tokens = one_process(tmp_path / "one by one", tmp_path / "nvfp4")
    sources = ("one by one", "stacks")
    runs = [a_run(tmp_path / source, tmp_path / f"split {source}", "fsdp and tp", {}) for source in sources]
    codes, outputs = launch(tmp_path, runs, ranks=4)
    assert codes == [0] * 4, "\n".join(o[-3000:] for o in outputs)
    for source in sources:
        result = torch.load(tmp_path / f"split {source}" / "result.pt")
        assert result["local"]["gate_up_proj"] == [4, 64, 32]
        assert torch.equal(result["tokens"], tokens) and relative_error(result["logits"], logits) < 1e-5
        same_tensors(expected, tmp_path / f"split {source}")


@on_two_gpus
@pytest.mark.parametrize("mode", MODES)
def test_experts_split_over_two_gpus(mode, tmp_path):
    """Each rank packs its part, once (FSDP2 brings whole weights, as it got them); saved files equal those of one
    process."""
    if mode == "tp" and Version(torch.__version__) < Version("2.13"):
        pytest.skip("torch 2.11 does not gather what transformers splits in strides (_StridedShard): 2.13 does")
    expected, logits, _ = one_process(folder(tmp_path, qwen), tmp_path / "nvfp4", torch.bfloat16)
    out = tmp_path / "out"
    codes, outputs = launch(tmp_path, [a_run(expected, out, mode, hopper=True)], "nccl")
    assert codes == [0, 0], "\n".join(o[-3000:] for o in outputs)
    packed = mode != "fsdp"
    assert any("brought into the layout" in o for o in outputs) != packed
    result = torch.load(out / "result.pt")
    assert result["packed"] == [packed, packed]
    assert relative_error(result["logits"], logits) < 0.05
    same_tensors(expected, out)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused(case, results):
    path, _ = results
    for rank in (0, 1):
        assert REFUSED[case][-1] in (path / f"{case} rank {rank}").read_text()


@pytest.mark.parametrize("family", [gpt_oss, llama4], ids=lambda f: f.__name__)
def test_the_way_out_is_one_that_the_model_has(family):
    """Weights that are transposed in files cannot be split by their tensor-parallel plan. Llama 4 has no other plan (in
    transformers 5.17 it had)."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = swap_experts(make(family), progress=False)
        name, experts = next((n, m) for n, m in model.named_modules() if isinstance(m, HFExperts))
        for key in ("gate_up_proj", "gate_up_proj_sf"):
            split = distribute_tensor(getattr(experts, key), mesh, [Shard(1)])
            setattr(experts, key, torch.nn.Parameter(split, requires_grad=False))
        with pytest.raises(NotImplementedError, match="stores its experts transposed") as error:
            check_sharding(name, experts, model)
    finally:
        torch.distributed.destroy_process_group()
    has_plan = bool(model._ep_plan)
    assert has_plan or family is llama4
    assert ("ep_size=n" in str(error.value)) == has_plan
    assert ("no plan of expert parallelism" in str(error.value)) == (not has_plan)
