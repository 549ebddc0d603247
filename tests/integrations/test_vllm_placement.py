"""vLLM with experts that stay on the CPU. Here everything is on the CPU: where layers would be on a GPU, the device
"meta" stands for it. tests/integrations/test_vllm_gpu.py runs on a GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")

from moe_nvfp4.backends import Device  # noqa: E402
from moe_nvfp4.integrations.vllm import engine, method  # noqa: E402
from moe_nvfp4.integrations.vllm.placement import Placement  # noqa: E402
from moe_nvfp4.quantize.convert import convert_checkpoint  # noqa: E402
from tests.integrations.test_vllm import Config, same  # noqa: E402
from tests.integrations.vllm_engine import ask  # noqa: E402
from tests.integrations.vllm_engine import engine as start  # noqa: E402
from tests.models import folder, qwen3_moe  # noqa: E402

GPU = torch.device("meta")


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    root = tmp_path_factory.mktemp("placement")
    folder(root, lambda: qwen3_moe(8, 64, head_dim=32, hidden_size=128, num_hidden_layers=3))
    convert_checkpoint(root / "bf16", root / "nvfp4", progress=False)
    return root / "nvfp4"


def overrides(cpu_experts, **more):
    return {"hf_overrides": {"moe_nvfp4": {"cpu_experts": cpu_experts, **more}}}


def on_cpu(llm):
    return llm.apply_model(lambda model: [m.nvfp4.on_cpu for m in model.modules() if hasattr(m, "nvfp4")])[0]


# ---------------------------------------------------------------- which layers
def settled(wanted, sizes, room=None):
    placement, created = Placement(wanted), []
    for size in sizes:
        created.append(placement.next_on_cpu())
        placement.add(size)
    return created, [placement.stays(i, "Model", room) for i in range(len(sizes))], str(placement)


def test_a_number_counts_from_the_first_layer():
    for wanted, count in ((0, 0), (2, 2), (4, 4), ("all", 4)):
        created, stay, said = settled(wanted, [10**9] * 4)
        assert created == stay == [True] * count + [False] * (4 - count)
        assert f"experts of {count} of 4 layers stay on the CPU" in said
    later = Placement("all")  # a layer for drafts is made when the others are settled
    assert [later.stays(later.add(1), "Model", None) for _ in range(2)] == [True, True]
    with pytest.raises(ValueError, match=r"cpu_experts=5: Model has 4 layers of experts"):
        settled(5, [1] * 4)


def test_auto_fills_the_gpu_from_the_last_layer():
    """Of 98 bytes 37 are taken: 61 are left, which the last two layers take, and only one of them if a byte lacks."""
    needs = {"other weights": 30, "a KV cache of 5 tokens": 5, "scratch": 2}
    created, stay, _ = settled("auto", [10, 30, 21, 40], lambda largest: (98, needs))
    assert created == [True] * 4 and stay == [True, True, False, False]
    assert settled("auto", [10, 30, 21, 40], lambda largest: (97, needs))[1] == [True, True, True, False]
    assert settled("auto", [10, 30, 21, 40], lambda largest: (98 + largest, needs))[1] == [False] * 4
    assert settled("auto", [10, 30, 21, 40], lambda largest: (37, needs))[1] == [True] * 4
    with pytest.raises(ValueError, match=r"too few even .*: other weights, a KV cache of 5 tokens and scratch take"):
        settled("auto", [10], lambda largest: (36, needs))


def test_what_auto_reckons_with(nvfp4, monkeypatch):
    """vLLM's own numbers for a real engine, against a hand computation."""
    llm = start(nvfp4, max_num_batched_tokens=256, max_num_seqs=16, gpu_memory_utilization=0.4, max_model_len=100)
    config = llm.llm_engine.vllm_config
    config.cache_config.kv_cache_memory_bytes = None
    moe = llm.apply_model(lambda model: [m.moe_config for m in model.modules() if hasattr(m, "nvfp4")])[0][0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 50 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 12345)
    memory, needs = engine.room(config, moe, 5000)
    blocks = -(-100 // config.cache_config.block_size)
    cache = 3 * 2 * 2 * 32 * 4 * blocks * config.cache_config.block_size  # layers, k and v, heads, channels, fp32
    step = 256 * 2 * (128 + 3 * 64) * 2 + 16 * 96 * 12
    assert memory == int((50 << 30) * 0.4)
    assert needs == {"other weights": 12345, "a KV cache of 100 tokens": cache,
                     "scratch for 256 tokens at a time": (1 << 30) + 2 * 5000 + step}  # fmt: skip
    assert list(engine.room(config, moe, 2 << 30)[1].values())[2] == (3 << 30) + step
    config.cache_config.kv_cache_memory_bytes = 777
    assert 777 in engine.room(config, moe, 1)[1].values()
    llm.llm_engine.engine_core.shutdown()


# ---------------------------------------------------------------- in an engine
def test_answers(nvfp4, monkeypatch):
    """Equal to those without; and "auto" asks what the machine has room for: here, for one layer and a half."""
    answers, sizes = {}, []
    monkeypatch.setattr(Config, "maybe_update_config", lambda self, *args, **kw: self.choose(self.wanted))
    real = method.Placement.stays

    def stays(self, number, model, room):
        sizes[:] = self.sizes
        return real(self, number, model, lambda largest: (3 * largest // 2 + 7, {"others": 7}))

    monkeypatch.setattr(Placement, "stays", stays)
    for wanted, where in (
        (0, [False] * 3),
        (1, [True, False, False]),
        ("all", [True] * 3),
        ("auto", [True, True, False]),
    ):
        monkeypatch.setattr(Config, "wanted", {"cpu_experts": wanted}, raising=False)
        llm = start(nvfp4)
        assert on_cpu(llm) == where + [False] * (3 - len(where))
        answers[wanted] = ask(llm)
        llm.llm_engine.engine_core.shutdown()
        same(answers[wanted], answers[0], 1e-6)
    matrix = 8 * 64 * 128 * 9 // 16
    assert sizes == [3 * matrix + 3 * 8 * 4] * 3


class Loaded(Exception):
    pass


def test_where_weights_are_made(nvfp4, monkeypatch):
    """Those that stay never are on the GPU. With "auto", all are read into host memory, and go to the GPU one layer
    after the other."""
    made, moved = [], []
    monkeypatch.setattr(method.torch, "get_default_device", lambda: GPU)
    monkeypatch.setattr(method, "serve_beside", lambda device, threads: moved.append(device))
    monkeypatch.setattr(method, "prepare", lambda *args: None)
    monkeypatch.setattr(engine, "room", lambda config, moe, largest: (300_000, {"others": 0}))  # a layer has 110 688
    monkeypatch.setattr(method.ExpertLoader, "finish", lambda self: None)
    monkeypatch.setattr(Config, "maybe_update_config", lambda self, *args, **kw: self.choose(self.wanted))
    real = method.MoeNvfp4Method.process_weights_after_loading

    def process(self, layer):
        before = layer.nvfp4.down_proj.device
        real(self, layer)
        made.append((before.type, layer.nvfp4.down_proj.device.type, layer.nvfp4.on_cpu))
        if len(made) == 3:
            raise Loaded

    monkeypatch.setattr(method.MoeNvfp4Method, "process_weights_after_loading", process)
    there, stays = ("meta", "meta", False), ("cpu", "cpu", True)
    for wanted, where in ((0, [there] * 3), (2, [stays, stays, there]), ("all", [stays] * 3),
                          ("auto", [stays, ("cpu", "meta", False), ("cpu", "meta", False)])):  # fmt: skip
        monkeypatch.setattr(Config, "wanted", {"cpu_experts": wanted}, raising=False)
        with pytest.raises(Loaded):
            start(nvfp4)
        assert made == where and moved == [GPU] * where.count(stays)
        made.clear(), moved.clear()


def test_bf16_experts_are_quantized_where_x_is(monkeypatch):
    """Not by the CPU that keeps them: on the GPU this takes a fraction of the time."""
    from moe_nvfp4 import NVFP4Experts
    from moe_nvfp4.integrations.vllm import loading

    seen = []
    real = loading.quantize_matrix

    def quantize(matrix, *args):
        seen.append(matrix.device)
        return real(torch.ones(matrix.shape), *args[:-1], torch.tensor(1.0))

    monkeypatch.setattr(loading, "quantize_matrix", quantize)
    loader = loading.ExpertLoader(NVFP4Experts(1, 32, 16), "layer", None, device=GPU)
    for part, shape in (("gate_proj", (16, 32)), ("up_proj", (16, 32)), ("down_proj", (32, 16))):
        loader.load("weight", part, 0, torch.ones(shape), part)
    assert seen == [GPU, GPU] and loader.experts.down_proj.device.type == "cpu"
    loader.finish()


# ---------------------------------------------------------------- what is refused
def test_options():
    for wrong in (-1, True, "some", 1.5, None, [1]):
        with pytest.raises(ValueError, match="cpu_experts must be a number of layers, 'all' or 'auto', got"):
            Config().choose({"cpu_experts": wrong})
    for right in (0, 3, "all", "auto"):
        assert Config().choose({"cpu_experts": right}).placement.wanted == right


def test_auto_needs_a_gpu_and_a_number_its_layers(nvfp4):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(str(nvfp4), dtype="float32", skip_tokenizer_init=True, **overrides("auto"))
    with pytest.raises(ValueError, match="'auto' asks the GPU for its memory, and there is none: say 'all' or"):
        arguments.create_engine_config()
    with pytest.raises(ValueError, match="cpu_experts=4: Qwen3MoeForCausalLM has 3 layers of experts"):
        start(nvfp4, **overrides(4))


@pytest.mark.parametrize(
    ("ranks", "graphs", "device", "fused", "by_request", "text"),
    [
        (2, False, "cpu", True, False, "beside one GPU, and this engine has 2 ranks: leave out cpu_experts"),
        (2, True, "cuda", True, False, "this engine has 2 ranks"),
        (1, True, "cuda", False, False, "adapter of experts, or a gate .*add --enforce-eager"),
        (1, False, "cuda", True, True, "adapters of experts, which are on the GPU: leave out cpu_experts, or .*q_proj"),
        (1, False, "cuda", False, False, None),
        (1, True, "cuda", True, False, None),
        (1, True, "cpu", False, False, None),
        (1, True, "cpu", True, True, None),
    ],
)
def test_what_cannot_run_is_refused_by_name(monkeypatch, ranks, graphs, device, fused, by_request, text):
    from vllm.config import CUDAGraphMode

    mode = CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
    monkeypatch.setattr(engine, "get_current_vllm_config", lambda: SimpleNamespace(
        parallel_config=SimpleNamespace(world_size_across_dp=ranks),
        compilation_config=SimpleNamespace(cudagraph_mode=mode)))  # fmt: skip
    layer = SimpleNamespace(layer_name="layer")
    refuse = lambda: engine.refuse_on_cpu(layer, torch.device(device), fused, by_request)
    if text is None:
        return refuse()
    with pytest.raises(NotImplementedError, match=f"layer: .*{text}"):
        refuse()


@pytest.mark.parametrize(
    ("device", "graphs", "dtype", "capability", "sizes", "slots", "text"),
    [
        ("cuda", True, torch.float32, (9, 0), (64, 32), 0, "in bf16.*here are torch.float32, 9.x and 64 and 32 chan"),
        ("cuda", True, torch.bfloat16, (8, 0), (64, 32), 65, "here 4160.* 8.x and 64 and 32 channels: add --enforce-e"),
        ("cuda", True, torch.bfloat16, (12, 0), (64, 32), 65, "12.x"),
        ("cuda", True, torch.bfloat16, (9, 0), (64, 36), 65, "64 and 36 channels"),
        ("cuda", True, torch.bfloat16, (10, 0), (64, 32), 65, None),
        ("cuda", True, torch.float16, (8, 0), (64, 36), 64, None),
        ("cuda", True, torch.bfloat16, (12, 0), (64, 36), 0, None),
        ("cuda", False, torch.float32, (8, 0), (64, 36), 0, None),
        ("cpu", True, torch.float32, None, (64, 36), 0, None),
    ],
)
def test_graphs_that_adapters_would_break_are_refused(
    monkeypatch, device, graphs, dtype, capability, sizes, slots, text
):
    """Only what Triton does not add and torch cannot without waiting."""
    from vllm.config import CUDAGraphMode

    mode = CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
    lora = SimpleNamespace(max_loras=slots) if slots else None
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode), lora_config=lora)
    monkeypatch.setattr(engine, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = Device("cuda", "a GPU", capability, frozenset({"triton"}))
    monkeypatch.setattr(Device, "of", lambda device: found)
    layer = SimpleNamespace(layer_name="layer")
    refuse = lambda: engine.refuse_graphs(layer, torch.device(device), dtype, sizes, 64)
    if text is None:
        return refuse()
    with pytest.raises(NotImplementedError, match=f"layer: .*{text}"):
        refuse()
