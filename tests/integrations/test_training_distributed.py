"""Two gloo processes: DDP and FSDP2 around LoRA on 4-bit experts, gradients through tensor and expert parallelism."""

import pytest
import torch

pytest.importorskip("peft", reason="LoRA needs peft")

from tests.common import processes, relative_error  # noqa: E402
from tests.integrations.test_distributed import MODES as PLANS  # noqa: E402
from tests.models import IDS, folder, load, qwen3_moe  # noqa: E402

pytestmark = pytest.mark.slow

START = """
import copy, sys
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, path, nvfp4 = dist.get_rank(), *sys.argv[1:3]
ids = torch.tensor([[3, 17, 40, 5, 9, 11, 2, 8], [4, 1, 77, 30, 9, 12, 60, 5]])
"""

DATA_PARALLEL = """
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from moe_nvfp4 import NVFP4Experts
from moe_nvfp4.scales import fp32_parameters
from moe_nvfp4.integrations.huggingface import prepare_model, swap_experts
from tests.common import relative_error, stand_for_hopper
from tests.integrations.test_peft import config, swapped
from tests.models import load, make, qwen3_moe

def gradients(model, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    grads = {n.replace("module.", "", 1): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}

torch.manual_seed(0)
alone = get_peft_model(swapped(), config())
split = copy.deepcopy(alone)
want = gradients(alone, ids)  # of both sequences, whose mean is the mean of the ranks'
mine = ids[rank : rank + 1]

found = gradients(DistributedDataParallel(copy.deepcopy(split)), mine)
assert found.keys() == want.keys()
assert max(relative_error(found[n], want[n]) for n in want) < 1e-5

for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
    model, mesh = copy.deepcopy(split), init_device_mesh("cpu", (2,))
    bf16 = policy.param_dtype is not None
    spared = dict(ignored_params=fp32_parameters(model)) if bf16 else {}
    for block in [*model.base_model.model.model.layers, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy, **spared)
    found = gradients(model, mine)
    assert found.keys() == want.keys()
    assert max(relative_error(found[n], want[n]) for n in want) < (0.15 if bf16 else 1e-5), bf16

cast = copy.deepcopy(split)
for block in [*cast.base_model.model.model.layers, cast]:
    fully_shard(block, mesh=mesh, mp_policy=policy)
try:
    cast(mine)
    raise AssertionError("ran with scales that were rounded")
except TypeError as error:
    assert "or load in bf16 and leave that out (Trainer's bf16=True, DistributedConfig's fsdp_mixed" in str(error)

try:
    model.add_adapter("later", config())
    raise AssertionError("was added: nothing would add up its gradients")
except NotImplementedError as error:
    assert "load without distributed_config, then get_peft_model, then fully_shard" in str(error)

dense = make(qwen3_moe)
fully_shard(dense, mesh=mesh)
try:
    swap_experts(dense, progress=False)
    raise AssertionError("was swapped")
except ValueError as error:
    assert "model.layers.0.mlp.experts: the weights are split over ranks: swap first and then" in str(error)

inner = model.base_model.model
try:
    inner.save_pretrained(path)
    raise AssertionError("was saved")
except NotImplementedError as error:
    assert "get_model_state_dict, full_state_dict=True), then save on one, save_pretrained(folder, state" in str(error)
whole = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    as_before = copy.deepcopy(split).base_model.model
    for parameter in as_before.parameters():
        parameter.data.zero_()
    as_before.load_state_dict(whole)
    assert torch.equal(as_before(ids).logits, alone(ids).logits)

torch.manual_seed(0)
plain = swapped()
split = copy.deepcopy(plain)
fully_shard(split, mesh=mesh)
whole = get_model_state_dict(split, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    split.save_pretrained(path, state_dict=whole)
    assert torch.equal(load(path, plain.dtype)(ids).logits, plain(ids).logits)
    get_peft_model(plain, config(experts=False)).save_pretrained(f"{path} adapter")
dist.barrier()
used = PeftModel.from_pretrained(split, f"{path} adapter")  # not to be trained
torch.manual_seed(0)
want = PeftModel.from_pretrained(swapped(), f"{path} adapter")(ids).logits
assert relative_error(used(ids).logits, want) < 1e-5
try:
    get_peft_model(used.unload(), config(experts=False))
    raise AssertionError("was added: nothing would add up its gradients")
except NotImplementedError as error:
    assert "fully_shard (or DistributedConfig(fsdp_size=...)) has split this model" in str(error)

# As on a Hopper GPU: weights that were packed before are split so, and others are gathered in the checkpoint's layout
def hidden(model):
    with torch.no_grad():
        return model(ids).logits

everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
others = make(qwen3_moe, torch.bfloat16)
mine = swap_experts(copy.deepcopy(others), linears="all", progress=False)
for p in others.parameters():
    p.data = p.data.flip(0)
other = swap_experts(others, linears="all", progress=False)
with stand_for_hopper():
    for prepare in (prepare_model, lambda model: model):
        one, two = (prepare(copy.deepcopy(model)) for model in (mine, other))
        assert all(m.packed == (prepare is prepare_model) for m in one.modules() if isinstance(m, NVFP4Experts))
        for model in (one, two):
            for block in [*model.model.layers, model]:
                fully_shard(block, mesh=mesh)
        assert torch.equal(hidden(one), hidden(copy.deepcopy(mine)))
        whole = get_model_state_dict(one, options=everything)
        if rank == 0:
            one.save_pretrained(path, state_dict=whole)
            want = mine.state_dict()
            for found in (whole, load(path).state_dict()):
                assert found.keys() == want.keys() and all(torch.equal(found[key], want[key]) for key in want)
        dist.barrier()
        set_model_state_dict(one, get_model_state_dict(two))
        assert torch.equal(hidden(one), hidden(copy.deepcopy(other)))
        try:
            one.to(torch.float16)
            assert prepare is not prepare_model, "was cast"
        except NotImplementedError as error:
            assert "move, convert or merge the model before fully_shard" in str(error)
print("data parallel: done", flush=True)
"""
MODEL_PARALLEL = """
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from moe_nvfp4.integrations.huggingface.experts import HFExperts

for name, mode in eval(sys.argv[3]).items():
    model = AutoModelForCausalLM.from_pretrained(
        nvfp4, dtype=torch.float32, distributed_config=DistributedConfig(**mode)).eval()
    assert all(m.down_proj.requires_grad is False for m in model.modules() if isinstance(m, HFExperts))
    leaf = model.get_input_embeddings()(ids)
    leaf = (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).detach().requires_grad_()
    model(inputs_embeds=leaf, labels=ids).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    grads = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    if rank == 0:
        torch.save((leaf.grad, {n: g for n, g in grads.items() if "norm" in n or n.endswith("gate.weight")}),
                   f"{nvfp4}/{name}.pt")
dist.barrier()
"""
MODES = {name: mode for name, mode in PLANS.items() if name != "fsdp"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(the folder of an NVFP4 model, exit codes, outputs) of two processes that have run all of the above: each takes
    seconds to import what it needs."""
    from moe_nvfp4.integrations.huggingface import swap_experts

    path = tmp_path_factory.mktemp("ranks")
    source = folder(path, lambda: qwen3_moe(intermediate=64), dtype=torch.float32)
    swap_experts(load(source, torch.float32), progress=False).save_pretrained(path / "nvfp4")
    code = START + DATA_PARALLEL + MODEL_PARALLEL + "\ndist.destroy_process_group()\n"
    return path / "nvfp4", *processes(2, path, code, path / "saved", path / "nvfp4", MODES)


def test_ddp_and_fsdp_give_the_gradients_of_one_process(ranks):
    _, _, outputs = ranks
    assert all("data parallel: done" in o for o in outputs), "\n".join(o[-3000:] for o in outputs)


def test_tensor_and_expert_parallel_give_the_gradients_of_one_process(ranks):
    """The gradients of the embeddings, the norms and the routers."""
    nvfp4, codes, outputs = ranks
    assert codes == [0, 0], "\n".join(o[-3000:] for o in outputs)
    model = load(nvfp4, torch.float32)
    ids = torch.cat([IDS, torch.tensor([[4, 1, 77, 30, 9, 12, 60, 5]])])
    leaf = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=leaf, labels=ids).loss.backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for mode in MODES:
        of_leaf, grads = torch.load(nvfp4 / f"{mode}.pt")
        assert relative_error(of_leaf, leaf.grad) < 1e-4, mode
        assert any(name.endswith("gate.weight") for name in grads)
        for name, grad in grads.items():
            assert relative_error(grad, want[name]) < 1e-4, (mode, name)
