"""LoRA adapters of experts in vLLM, one for all requests or one that each chooses: they answer as PEFT's under
transformers."""

import json
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from safetensors.torch import save_file

from moe_nvfp4.integrations.peft_versions import exchanged  # noqa: E402
from moe_nvfp4.integrations.vllm.adapters import ExpertsAdapter, Pair, Share, adapters_of, adapters_of_linears
from tests.folders import change_config, qwen2_moe
from tests.models import folder, gemma4, gpt_oss, llama4, load, mixtral, qwen3_moe, tensors

pytest.importorskip("peft")
E, H, I, R = 8, 128, 96, 4
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder in bf16, and adapters of its experts."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("adapters")
    folder(root, lambda: qwen3_moe(E, I, head_dim=32, hidden_size=H))
    for name, parameters, more in (("both", BOTH, {}), ("down", BOTH[1:], {"use_rslora": True}),
                                   ("attention", BOTH, {"target_modules": ["q_proj"]}), ("more", BOTH, {"r": 11}),
                                   ("linears", [], {"target_modules": ["q_proj"], "lora_alpha": 20}),
                                   ("wide", BOTH, {"r": 16})):  # fmt: skip
        config = LoraConfig(**{"r": R, "lora_alpha": 6, "target_modules": [], "target_parameters": parameters,
                               "init_lora_weights": False} | more)  # fmt: skip
        get_peft_model(load(root / "bf16", torch.float32), config).save_pretrained(root / name)
    for name in ("both", "wide"):  # as PEFT writes it where experts are modules
        changed(root, root / f"{name} single", by_expert, of=name, target_modules=["gate_proj", "up_proj", "down_proj"])
    return root


def also(files, module):
    """Add an adapter of another module."""
    for side in "AB":
        name = f"base_model.model.{{}}.lora_{side}.weight"
        files[name.format(module)] = files[name.format("model.layers.1.mlp.experts")].clone()


def by_expert(files, experts=E):
    """Adapters of stacks -> the same of each expert's linears, of which gate and up have the same A."""
    for stack in [name.removesuffix(".lora_A.weight") for name in files if "experts" in name and "lora_A" in name]:
        A, B = files.pop(f"{stack}.lora_A.weight"), files.pop(f"{stack}.lora_B.weight")
        r = len(A) // E
        A, B = A.view(E, r, -1), B.view(len(B), r, E).permute(2, 0, 1)
        for e in range(experts):
            a, b = A[e % E], B[e % E]
            inner = stack.endswith(".base_layer")
            parts = zip(("gate_proj", "up_proj"), b.chunk(2), strict=True) if inner else [("down_proj", b)]
            for part, rows in parts:
                name = f"{stack.removesuffix('.base_layer')}.{e}.{part}"
                files |= {f"{name}.lora_A.weight": a.clone(), f"{name}.lora_B.weight": rows.clone()}


def whole(adapter, layer=1, **changes):
    given = {"sizes": (E, H, I), "gated": True, "mine": range(E), "tp": (0, 1)} | changes
    return adapter.of(f"model.layers.{layer}.mlp.experts", Share(**given))


def products(adapters):
    return [[a.b.double() @ a.a.double() for a in some] for some in adapters]


def test_what_it_adds_is_what_peft_adds(model):
    """Against PEFT's own sum for a dense parameter (`get_delta_weight`)."""
    from peft import PeftModel

    for name in ("both", "down"):
        peft = PeftModel.from_pretrained(load(model / "bf16", torch.float32), model / name)
        wrapped = peft.base_model.model.model.layers[1].mlp.experts
        want = {}
        while hasattr(wrapped, "parameter_name"):
            want[wrapped.parameter_name] = wrapped.get_delta_weight("default")
            wrapped = wrapped.base_layer
        up, down = products(whole(ExpertsAdapter(str(model / name))))
        found = dict(zip(("gate_up_proj", "down_proj"), (up, down), strict=True))
        assert {key for key, some in found.items() if some} == set(want)
        for key, delta in want.items():
            assert torch.allclose(found[key][0].float(), delta.float(), atol=1e-6, rtol=1e-5), key


@pytest.mark.parametrize("intermediate", [48, 64])  # the latter is H too
def test_gpt_oss_alternates_rows(tmp_path, intermediate):
    from peft import LoraConfig, get_peft_model

    small, experts = gpt_oss(intermediate=intermediate), "model.layers.1.mlp.experts"
    config = LoraConfig(r=R, target_modules=[], target_parameters=BOTH, init_lora_weights=False)
    peft = get_peft_model(small, config)
    peft.save_pretrained(tmp_path)
    wrapped, want = peft.base_model.model.get_submodule(experts), {}
    while hasattr(wrapped, "parameter_name"):
        want[wrapped.parameter_name] = wrapped.get_delta_weight("default").mT
        wrapped = wrapped.base_layer
    share = Share((4, small.config.hidden_size, intermediate), True, range(4), (0, 1), True, True)
    (up,), (down,) = products(ExpertsAdapter(str(tmp_path)).of(experts, share))
    gate_and_up = [want["gate_up_proj"][:, first::2] for first in range(2)]
    assert torch.allclose(up.float(), torch.cat(gate_and_up, dim=1), atol=1e-6, rtol=1e-5)
    assert torch.allclose(down.float(), want["down_proj"], atol=1e-6, rtol=1e-5)
    # alone, a square one may be of transformers 4, which does not tell PEFT that it is [E, in, out]
    A, B = torch.zeros(4 * R, intermediate), torch.zeros(64, 4 * R)
    with pytest.raises(NotImplementedError, match="what is in") if intermediate == 64 else nullcontext():
        adapters_of([Pair(A, B, R, 1.0, "0.21.2")], share, "the adapter")


def test_parts_of_ranks(model):
    """Channels of each expert, and some of the experts: their sums are parts of the whole's."""
    adapter = ExpertsAdapter(str(model / "both"))
    (up,), (down,) = products(whole(adapter))
    ranks = [products(whole(adapter, tp=(rank, 2))) for rank in range(2)]
    halves = [torch.cat([part[0][0].chunk(2, dim=1)[i] for part in ranks], dim=1) for i in range(2)]
    assert torch.equal(torch.cat(halves, dim=1), up)
    assert torch.equal(torch.cat([part[1][0] for part in ranks], dim=2), down)
    some = products(whole(adapter, mine=[5, 2]))
    assert torch.equal(some[0][0], up[[5, 2]]) and torch.equal(some[1][0], down[[5, 2]])
    assert whole(adapter, layer=7) == ((), ())
    assert adapter.changes("model.layers.1.mlp.experts") and not adapter.changes("model.layers.7.mlp.experts")
    assert not adapter.changes("mtp.layers.1.mlp.experts")  # a draft module's own layer


def changed(model, path, change, of="both", **said):
    path.mkdir()
    files, config = tensors(model / of), json.loads((model / of / "adapter_config.json").read_text())
    change(files)
    save_file(files, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config | said))
    return str(path)


def of_part(files, part, alone=False):
    """Give the tensors to another part of the model, too, or to that alone."""
    moved = {name.replace("model.layers", f"{part}.model.layers"): tensor.clone() for name, tensor in files.items()}
    if alone:
        files.clear()
    files.update(moved)


A = "base_model.model.model.layers.1.mlp.experts.lora_A.weight"
INNER = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_{}.weight"
SAME = lambda files: None  # noqa: E731


@pytest.mark.parametrize(
    ("change", "said", "text"),
    [
        (SAME, {"peft_type": "IA3"}, "peft_type IA3"),
        (SAME, {"nvfp4_mergeable": True}, "trained to be merged"),
        (lambda files: files.pop(A), {}, "no counterpart lora_A"),
        (
            lambda files: files.update({A: files[A][:-1].clone()}),
            {},
            r"expected rank \* experts = 32 by 128, 192 or by 96",
        ),
        (lambda files: files.update({A: files[A][:, :-1].clone()}), {}, "it is of another model"),
        (
            lambda files: of_part(files, "talker", alone=True),
            {},
            "changes .*talker.*: .* language model's experts alone",
        ),
        (lambda files: of_part(files, "other"), {}, "changes .* and .*other.*: .* language model's experts alone"),
    ],
)
def test_what_it_cannot_be_is_named(model, tmp_path, change, said, text):
    with pytest.raises((ValueError, NotImplementedError), match=text):
        whole(ExpertsAdapter(changed(model, tmp_path / "changed", change, **said)))


@pytest.mark.parametrize(("key", "value"), [
    ("use_dora", True), ("lora_bias", True), ("bias", "all"), ("rank_pattern", {"down_proj": 2}),
    ("alpha_pattern", {"down_proj": 2}), ("modules_to_save", ["lm_head"]), ("layer_replication", [[0, 2], [1, 2]]),
    ("alora_invocation_tokens", [1, 2]), ("trainable_token_indices", [5]),
])  # fmt: skip
def test_what_changes_more_than_the_two_factors_is_refused(model, tmp_path, key, value):
    with pytest.raises(NotImplementedError, match=f"{key}.*plain LoRA only"):
        ExpertsAdapter(changed(model, tmp_path / "changed", SAME, **{key: value}))


def test_other_adapters_are_named(model, tmp_path):
    with pytest.raises(NotImplementedError, match=r"q_proj.*is not of experts.*--enable-lora"):
        ExpertsAdapter(str(model / "attention"))
    with pytest.raises(ValueError, match="adapter 'somewhere': a folder on this machine"):
        ExpertsAdapter("somewhere")
    with pytest.raises(ValueError, match="changes layer 1, and the model has 1 layers"):
        ExpertsAdapter(str(model / "both")).check_layers(1)


@pytest.mark.parametrize("intermediate", [H // 2, H])  # [2I, H] is square (OLMoE, MiniMax-M2), or [H, I]
def test_a_square_adapter_is_read_as_peft_has_it(tmp_path, intermediate):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=R, target_modules=[], target_parameters=BOTH, init_lora_weights=False)
    peft = get_peft_model(qwen3_moe(E, intermediate, head_dim=32, hidden_size=H), config)
    peft.save_pretrained(tmp_path / "square")
    wrapped, want = peft.base_model.model.model.layers[1].mlp.experts, {}
    while hasattr(wrapped, "parameter_name"):
        want[wrapped.parameter_name] = wrapped.get_delta_weight("default")
        wrapped = wrapped.base_layer
    sizes = {"sizes": (E, H, intermediate)}
    (up,), (down,) = products(whole(ExpertsAdapter(str(tmp_path / "square")), **sizes))
    for found, parameter in ((up, "gate_up_proj"), (down, "down_proj")):
        assert torch.allclose(found.float(), want[parameter].float(), atol=1e-6, rtol=1e-5)

    def alone(files):
        """Without the other matrix, whose sizes tell the order of both."""
        for stem in {name.rpartition(".lora_")[0] for name in files}:
            sides = [f"{stem}.lora_{side}.weight" for side in "AB"]
            if files[sides[0]].shape[1] != files[sides[1]].shape[0]:
                del files[sides[0]], files[sides[1]]

    for changes, transposed, message in (
        ({}, None, "which does not say what is in"),  # Llama 4
        ({"peft_version": None}, False, r"was written by PEFT before 0\.18, which has what is in"),
        ({"peft_version": "mine"}, False, "which does not say what is in"),
        ({"peft_version": "0.19.0@1a2b3c4"}, False, r"was written by PEFT 0\.19\.0@1a2b3c4, which has what is in"),
    ):
        path = changed(tmp_path, tmp_path / f"{changes}{transposed}", alone, of="square", **changes)
        with pytest.raises(NotImplementedError, match=message):
            whole(ExpertsAdapter(path), transposed=transposed, **sizes)


def test_a_square_adapter_of_experts_without_a_gate_may_be_of_either_matrix(model, tmp_path):
    name = "base_model.model.model.layers.1.mlp.experts"
    square = {f"{name}.lora_A.weight": torch.zeros(R * E, H), f"{name}.lora_B.weight": torch.zeros(H, R * E)}
    path = changed(model, tmp_path / "square", lambda files: (files.clear(), files.update(square)))
    with pytest.raises(NotImplementedError, match="does not say what is in and what is out"):
        whole(ExpertsAdapter(path), sizes=(E, H, H), gated=False)
    # PEFT before 0.19 has up_proj's shapes where others have down_proj's
    whole(ExpertsAdapter(str(model / "down")), gated=False)
    path = changed(model, tmp_path / "old", SAME, of="down", peft_version="0.18.1")
    with pytest.raises(NotImplementedError, match=r"was written by PEFT 0\.18\.1"):
        whole(ExpertsAdapter(path), gated=False)


@pytest.mark.parametrize(("version", "plain", "told"), [
    ("0.17.1", True, False), ("0.18.1", True, False), ("0.19.0", True, True), ("0.19.1", False, False),
    ("0.20.0.dev0@abc", False, False), ("0.21.2", False, False), (None, True, False), ("main", None, None),
])  # fmt: skip
def test_the_order_of_pefts_versions(version, plain, told):
    """What the wheels of these versions make of a parameter [E, out, in] (Qwen3-MoE) and of gpt-oss's [E, in, out]."""
    assert (exchanged(version, False), exchanged(version, True)) == (plain, told)


def test_linears_of_experts_that_are_modules():
    """What each expert's three linears add, with ranks of their own, or none; and the parts of ranks."""
    g = torch.Generator().manual_seed(0)
    sides, found, want = {"gate": (I, H), "up": (I, H), "down": (H, I)}, {}, {}
    for e in range(E):
        for part, (N, K) in sides.items():
            want[e, part] = torch.zeros(N, K, dtype=torch.float64)
            if e != 3 and (e, part) != (5, "up"):
                r = 1 + (e + len(part)) % 3
                A, B = torch.randn(r, K, generator=g), torch.randn(N, r, generator=g)
                found[e, part] = Pair(A, B, r, 0.5 + e)
                want[e, part] = (0.5 + e) * B.double() @ A.double()

    def check(mine, rank, size):
        up, down = adapters_of_linears(found, Share((E, H, I), True, mine, (rank, size)), "the adapter")
        up, (down,) = sum(products([up])[0]), products([down])[0]
        for i, e in enumerate(mine):
            halves = [want[e, part].chunk(size)[rank] for part in ("gate", "up")]
            assert torch.allclose(up[i], torch.cat(halves), rtol=1e-6, atol=1e-5)
            assert torch.allclose(down[i], want[e, "down"].chunk(size, dim=1)[rank], rtol=1e-6, atol=1e-5)

    check(range(E), 0, 1), check([5, 3], 0, 1), check(range(E), 1, 2)
    share = Share((E, H, I), False, range(E), (0, 1))
    up, down = adapters_of_linears({(2, "up"): found[2, "up"]}, share, "the adapter")
    assert down == () and torch.allclose(products([up])[0][0][2], want[2, "up"], rtol=1e-6, atol=1e-5)
    with pytest.raises(ValueError, match="the adapter has for up of expert 2 .*expected .*of another model"):
        adapters_of_linears({(2, "up"): found[2, "down"]}, share, "the adapter")


# ---------------------------------------------------------------- in vLLM
@pytest.mark.parametrize(("own", "theirs", "ours"), [
    ("block_sparse_moe.gate", "mlp.gate", "block_sparse_moe.gate"),  # Mixtral
    ("mlp.gate", "mlp.router.gate", "mlp.gate"),  # AFMoE
    ("attn.o_proj", "self_attn.o_proj", "attn.o_proj"),  # gpt-oss in InternVL
    ("mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"),  # Laguna
    ("mlp.shared_mlp.up_proj", "mlp.shared_experts.up_proj", "mlp.shared_mlp.up_proj"),  # HY-V3
    ("mlp.gate", "mlp.gate", "mlp.experts.gate"),  # also the runner's, by which the manager calls it (Dots)
    ("mlp.shared.gate_up_proj", "mlp.shared.up_proj", "mlp.experts.shared.up_proj"),  # fused, in a block of two places
    ("mlp.gate", "mlp.other", None), ("block_sparse_moe.gate", "mlp.gate.other", None),
])  # fmt: skip
def test_adapters_of_linears_have_the_names_of_vllms_manager(own, theirs, ours):
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from moe_nvfp4.integrations.vllm.linear_adapters import rename

    model, module = torch.nn.Module(), torch.nn.Linear(2, 2)
    at = model
    for part in own.split(".")[:-1]:
        at.add_module(part, torch.nn.Module())
        at = at.get_submodule(part)
    at.add_module(own.rpartition(".")[2], module)
    runner = (ours or "").startswith("mlp.experts.")
    if runner:
        model.mlp.experts = torch.nn.Module()
        model.mlp.experts.shared, model.mlp.experts.gate = getattr(model.mlp, "shared", None), module
    name = own.replace("mlp.", "mlp.experts.") if runner else own
    parts = {name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")} - {name}
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([model])
    adapters = {f"model.layers.0.{theirs}": 1, "model.layers.0.self_attn.q_proj": 2}
    rename(adapters, model, {f"model.layers.0.{name}": module}, {f"model.layers.0.{part}" for part in parts})
    assert adapters == {f"model.layers.0.{ours or theirs}": 1, "model.layers.0.self_attn.q_proj": 2}


FEW = {"enable_lora": True, "max_lora_rank": 16}
ON_EXPERTS = FEW | {"lora_target_modules": ["experts", "q_proj"]}


@pytest.fixture(scope="module")
def nvfp4(model):
    """The same model in NVFP4."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from moe_nvfp4.quantize.convert import convert_checkpoint

    convert_checkpoint(model / "bf16", model / "nvfp4", progress=False)
    return model / "nvfp4"


@pytest.fixture(scope="module")
def by_peft(model, nvfp4):
    """Prompt by prompt, with the adapter of each, what transformers with PEFT answers."""
    from tests.integrations.test_vllm import by_transformers

    answers = cache(lambda name: by_transformers(nvfp4, adapter=name and model / name))
    return lambda names: [[answers(name)[i][n] for n, name in enumerate(names)] for i in range(2)]


def test_answers(model, nvfp4, by_peft, tmp_path):
    """As PEFT's: on an NVFP4 folder, on bf16 experts quantized as they load, and on two ranks that split experts'
    channels or the experts: one adapter for all requests, and one that each chooses. Without they are others."""
    from tests.integrations.test_vllm import same
    from tests.integrations.vllm_engine import generate, on_two_ranks

    options = {"hf_overrides": {"moe_nvfp4": {"adapter": str(model / "both")}}}
    want = by_peft(["both"] * 8)
    same(generate(nvfp4, **options), want)
    same(generate(model / "bf16", quantization="moe_nvfp4", **options), want)
    with pytest.raises(AssertionError):
        same(generate(nvfp4), want, prompts=1)
    names = ["both", None, "down", "both", "more", None, "more", "down"]
    chosen = {"adapters": [name and str(model / name) for name in names], "max_loras": 3, **ON_EXPERTS}
    two, by_request = {"tensor_parallel_size": 2}, by_peft(names)
    forms = {
        "tensors": (options | two, want),
        "tensors by request": (chosen | two, by_request),
        "experts by request": (chosen | two | {"enable_expert_parallel": True}, by_request),
    }
    ranks = on_two_ranks({form: (nvfp4, given) for form, (given, _) in forms.items()}, tmp_path)
    for form, found in ranks.items():
        for one in found:
            same(one, forms[form][1])


def test_loading_again_restores_the_adapter(model, nvfp4):
    """Sleep at level 2, on a GPU, loses it together with the weights; here vLLM's reset does."""
    from tests.integrations.vllm_engine import ask, engine

    llm = engine(nvfp4, hf_overrides={"moe_nvfp4": {"adapter": str(model / "both")}})
    answers = ask(llm)
    llm.collective_rpc("reset_weights")
    assert ask(llm) != answers
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    again = ask(llm)
    llm.llm_engine.engine_core.shutdown()
    assert again == answers


def test_an_adapter_of_a_deeper_model_is_refused(model, nvfp4):
    from transformers import AutoConfig

    from moe_nvfp4.integrations.vllm.config import MoeNvfp4Config

    shallow = AutoConfig.from_pretrained(model / "bf16", num_hidden_layers=1)
    config = MoeNvfp4Config().choose({"adapter": str(model / "both")})
    with pytest.raises(ValueError, match="changes layer 1, and the model has 1 layers"):
        config.maybe_update_config(str(model / "bf16"), shallow)


def test_each_request_chooses(model, nvfp4, by_peft, tmp_path, monkeypatch):
    """Several adapters and none in one batch; more adapters than slots; one with linears; another under the number of
    one before; and adapters that do not fit are refused by name, without harm to others."""
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    from tests.integrations.test_vllm import same
    from tests.integrations.vllm_engine import ask, engine, lora

    monkeypatch.setattr(Qwen3MoeForCausalLM, "lora_skip_prefixes", ["mtp."])  # as Nemotron-H has
    llm = engine(nvfp4, max_loras=2, max_cpu_loras=3, **ON_EXPERTS)
    choose = lambda names: ask(llm, adapters=[name and model / name for name in names])
    for names in (
        [None, "both", "more", "both", None, "more", "more", "both"],
        [None] * 8,
        ["down", "both", "more", "both single", "down", "both", "more", "both single"],
        ["attention", "both", "attention", "more", "attention", "both single", "attention", "attention"],
        ["attention", None, "linears", None, None, "attention", None, "linears"],  # in all slots
    ):
        same(choose(names), by_peft(["both" if name == "both single" else name for name in names]))
    refused = {
        "mergeable": (SAME, {"nvfp4_mergeable": True}, "trained to be merged"),
        "pattern": (
            lambda files: [files.pop(INNER.format(side)) for side in "AB"],
            {"alpha_pattern": {"gate_up_proj": 9}},
            r"layers\.1\.mlp\.experts do not say which one",
        ),
        "side": (lambda files: files.pop(A), {}, "has lora_A or lora_B only"),
        "wide": (lambda files: files.update({A: files[A][:, :-1].clone()}), {}, "of another model"),
        "layers": (lambda files: also(files, "model.layers.7.mlp.experts"), {}, r"layers\.7\S* and others"),
        "draft": (lambda files: also(files, "mtp.q_proj"), {}, r"mtp\.q_proj and others"),
        "singles": (lambda files: by_expert(files, 9), {}, r"received.*experts\.8\.gate_proj"),
    }
    llm.llm_engine.add_lora(lora(model / "more"))
    cuts = {"B": lambda t: t[:-1], "A": lambda t: t[:, :-1].clone(), "A of a lower rank": lambda t: t[:-1]}
    of_ranks = r"factors of ranks 3 and 4 for model\.layers\.0\.self_attn\.q_proj, and rank 4 by adapter_config"
    for name, cut in cuts.items():
        smaller = lambda files: files.update({n: cut(t) for n, t in files.items() if f"lora_{name[0]}" in n})  # noqa: B023
        message = of_ranks if "rank" in name else r"qkv_proj, whose columns and .* of another model"
        with pytest.raises(ValueError, match=message):
            llm.llm_engine.add_lora(lora(changed(model, tmp_path / name, smaller, of="linears")))
    for name, (change, said, text) in refused.items():
        with pytest.raises((ValueError, NotImplementedError), match=text):
            llm.llm_engine.add_lora(lora(changed(model, tmp_path / name, change, **said)))
    with pytest.raises(ValueError, match=r"rank 32 .*more than 16: raise --max-lora-rank"):
        llm.llm_engine.add_lora(lora(model / "wide single"))
    number = lora(model / "both").lora_int_id
    llm.llm_engine.remove_lora(number)
    llm.llm_engine.add_lora(lora(model / "more", number))
    same(choose(["both"] * 8), by_peft(["more"] * 8))
    again = lora(tmp_path / "layers", number)  # in the place of "more", which stays
    again.load_inplace = True
    with pytest.raises(ValueError, match=r"layers\.7\S* and others"):
        llm.llm_engine.add_lora(again)
    same(choose(["both"] * 8), by_peft(["more"] * 8))
    same(choose([None] * 8), by_peft([None] * 8))

    def in_use(worker, kind):  # after vLLM has told for which part of a model the next tokens have an adapter
        from vllm.lora.layers import LoRAMapping, LoRAMappingType

        manager = worker.model_runner.lora_manager._adapter_manager
        manager._set_adapter_mapping(LoRAMapping((number,), (number,), type=getattr(LoRAMappingType, kind)))
        return {module.in_use for module in manager.experts.values()}

    found = [llm.collective_rpc(in_use, args=(kind,)) for kind in ("TOWER", "LANGUAGE")]
    assert found == [[{False}], [{True}]]
    llm.llm_engine.engine_core.shutdown()


def test_all_modules_may_have_adapters(model, nvfp4, by_peft):
    """Without --lora-target-modules the head may, too: vLLM then has no log-probabilities of prompts on a CPU."""
    from vllm import SamplingParams

    from tests.integrations.vllm_engine import NEW, PROMPTS, engine, lora

    llm = engine(nvfp4, max_loras=4, **FEW)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    for names in [None] * 8, ["both", None, "attention", "more", "both", None, "more", "down"]:
        requests = [name and lora(model / name) for name in names]
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=requests)
        assert [list(output.outputs[0].token_ids) for output in outputs] == by_peft(names)[0]
    assert sum(map(list.__ne__, by_peft([None] * 8)[0], by_peft(names)[0])) == 6
    llm.llm_engine.engine_core.shutdown()


def test_routers_and_shared_experts(tmp_path):
    """vLLM's model holds a router and a shared expert's gate in two places, and calls the one that it does not give
    adapters."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from peft import LoraConfig, get_peft_model

    from moe_nvfp4.quantize.convert import convert_checkpoint
    from tests.integrations.test_vllm import by_transformers, same
    from tests.integrations.vllm_engine import generate

    small = qwen2_moe()
    small.config.hidden_size = H
    bf16 = folder(tmp_path, lambda: type(small)(small.config))
    convert_checkpoint(bf16, tmp_path / "nvfp4", progress=False)
    shared = ["shared_expert_gate", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
    forms = {"router": ([], ["mlp.gate.weight"]), "gate": (shared[:1], []), "all": (shared, ["mlp.gate.weight", *BOTH])}
    for name, (modules, parameters) in forms.items():
        config = LoraConfig(r=R, target_modules=modules, target_parameters=parameters, init_lora_weights=False)
        get_peft_model(load(bf16, torch.float32), config).save_pretrained(tmp_path / name)
    chosen = [name and tmp_path / name for name in [*forms, None] * 2]
    targets = ["experts", "gate", "shared_expert_gate", "gate_up_proj", "down_proj"]
    found = generate(tmp_path / "nvfp4", adapters=chosen, max_loras=4, **FEW | {"lora_target_modules": targets})
    for first, adapter in enumerate(chosen[:4]):
        want = by_transformers(tmp_path / "nvfp4", adapter=adapter)
        same(*([each[first::4] for each in answers] for answers in (found, want)), prompts=2)


def test_latent_attention(tmp_path):
    """Its linears have adapters, but for the one that vLLM takes apart when weights are loaded."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from peft import LoraConfig, get_peft_model

    from moe_nvfp4.quantize.convert import convert_checkpoint
    from tests.integrations.test_vllm import by_transformers, latent_attention, same
    from tests.integrations.vllm_engine import ask, engine, lora

    bf16 = folder(tmp_path, latent_attention)
    convert_checkpoint(bf16, tmp_path / "nvfp4", progress=False)
    taken = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    for name, targets in (("taken", taken), ("refused", [*taken, "kv_b_proj"])):
        config = LoraConfig(r=R, target_modules=targets, init_lora_weights=False)
        get_peft_model(load(bf16, torch.float32), config).save_pretrained(tmp_path / name)
    llm = engine(tmp_path / "nvfp4", **FEW | {"lora_target_modules": [*taken, "kv_b_proj"]})
    with pytest.raises(ValueError, match=r"layers\.0\.\S*kv_b_proj and others \(2 in all\).*\(MLA\) takes the base"):
        llm.llm_engine.add_lora(lora(tmp_path / "refused"))
    found = ask(llm, adapters=[tmp_path / "taken"] * 8)
    llm.llm_engine.engine_core.shutdown()
    same(found, by_transformers(tmp_path / "nvfp4", adapter=tmp_path / "taken"))


@pytest.mark.parametrize("family", [llama4, gemma4], ids=lambda f: f.__name__)
def test_rows_that_vllm_loads_in_another_way(family, tmp_path):
    """Its loader of Llama 4 reorders those of q and k, and Gemma 4's full attention takes k for v, too; it leaves an
    adapter as it is."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from peft import LoraConfig, get_peft_model

    from moe_nvfp4.quantize.convert import convert_checkpoint
    from tests.integrations.test_vllm import by_transformers, same
    from tests.integrations.vllm_engine import ask, engine

    one_for_both = dict(attention_k_eq_v=True, global_head_dim=64, num_global_key_value_heads=1)
    more = one_for_both if family is gemma4 else {}
    bf16 = folder(tmp_path, lambda: family(head_dim=32, hidden_size=H, **more))
    convert_checkpoint(bf16, tmp_path / "nvfp4", progress=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=R, target_modules=targets, init_lora_weights=False)
    get_peft_model(load(bf16, torch.float32), config).save_pretrained(tmp_path / "adapter")
    llm = engine(tmp_path / "nvfp4", **FEW | {"lora_target_modules": targets})
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    with runner.maybe_setup_dummy_loras(runner.lora_config):  # as before a warm-up on a GPU
        pass
    found = ask(llm, adapters=[tmp_path / "adapter"] * 8)
    llm.llm_engine.engine_core.shutdown()
    same(found, by_transformers(tmp_path / "nvfp4", adapter=tmp_path / "adapter"))


def test_rows_that_ranks_share(tmp_path):
    """Of a Mamba layer of one group each rank has its heads' rows and all of the group's."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from peft import LoraConfig, get_peft_model
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    from moe_nvfp4.quantize.convert import convert_checkpoint
    from tests.integrations.test_vllm import by_transformers, same
    from tests.integrations.vllm_engine import on_two_ranks

    config = GraniteMoeHybridConfig(
        vocab_size=96, hidden_size=128, intermediate_size=64, shared_intermediate_size=64, num_hidden_layers=2,
        layer_types=["mamba", "attention"], num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, pad_token_id=0,
    )  # fmt: skip
    bf16 = folder(tmp_path, lambda: GraniteMoeHybridForCausalLM(config))
    convert_checkpoint(bf16, tmp_path / "nvfp4", progress=False)
    targets = ["in_proj", "q_proj"]
    config = LoraConfig(r=R, target_modules=targets, init_lora_weights=False)
    get_peft_model(load(bf16, torch.float32), config).save_pretrained(tmp_path / "adapter")
    options = FEW | {"lora_target_modules": targets, "tensor_parallel_size": 2}
    adapters = [str(tmp_path / "adapter")] * 8
    want = by_transformers(tmp_path / "nvfp4", adapter=tmp_path / "adapter")
    forms = {"tensors": options | {"adapters": adapters}}
    forms["experts"] = forms["tensors"] | {"enable_expert_parallel": True}
    ranks = on_two_ranks({form: (tmp_path / "nvfp4", given) for form, given in forms.items()}, tmp_path)
    for form in forms:
        for found in ranks[form]:
            same(found, want)


def test_rows_of_fused_linears_on_ranks():
    """Each rank's are those that the linear's own loader takes."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from vllm.lora.layers import ColumnParallelLinearWithLoRA
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    from moe_nvfp4.integrations.vllm.linear_adapters import split_rows

    for sizes, rows in (([12], [6, 7, 8, 9, 10, 11]), ([6, 6], [3, 4, 5, 9, 10, 11]), ([8, 4], [4, 5, 6, 7, 10, 11])):
        module, linear = (kind.__new__(kind) for kind in (ColumnParallelLinearWithLoRA, MergedColumnParallelLinear))
        for made in (module, linear):
            torch.nn.Module.__init__(made)
        linear.output_sizes, linear.output_size = sizes, 12
        module.base_layer, module.tp_rank, module.tp_size, module.output_size = linear, 1, 2, 6
        split_rows({"in_proj": module}, torch.nn.Module())
        b = torch.arange(12.0)[:, None].expand(-1, R)
        assert torch.equal(module.slice_lora_b(b), b[rows])
        assert len(module.slice_lora_b(b[:6])) == 6  # of a warm-up
        with pytest.raises(ValueError, match="has 10 rows for in_proj, which has 12"):
            module.slice_lora_b(b[:10])


def test_parts_of_fused_linears():
    """Qwen3.5 has in_proj_qkv and in_proj_z, of which the first is three of vLLM's four."""
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from moe_nvfp4.integrations.vllm.linear_adapters import _of_parts

    some, rows = torch.ones(1), [8, 8, 16, 16]
    assert _of_parts("in_proj_qkvz", [some, some], rows) == _of_parts("in_proj_qkvz", [some, None], rows) == [32, 16]
    assert _of_parts("in_proj", [some], rows) == [48] and _of_parts("qkvz", [None, some, None, some], rows) == rows
    with pytest.raises(NotImplementedError, match="a part of in_proj_qkvz without the first one"):
        _of_parts("in_proj_qkvz", [None, some], rows)


def test_rows_that_vllm_reorders_in_k2_horizon():
    pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")
    from moe_nvfp4.integrations.vllm.linear_adapters import as_loaded

    model = torch.nn.Module()
    model.attn = torch.nn.Module()
    model.attn.fold_rope_weights = False
    as_loaded({"attn.q_proj": 1}, model)
    model.attn.fold_rope_weights = True
    as_loaded({"attn.v_proj": 1, "attn.o_proj": 2}, model)
    with pytest.raises(NotImplementedError, match=r"changes attn.q_proj, whose rows vLLM's .* reorders"):
        as_loaded({"attn.o_proj": 1, "attn.q_proj": 2}, model)


@pytest.mark.parametrize("form", ["W4A4", "gpt-oss", "Mixtral"])
def test_other_forms(model, nvfp4, tmp_path, form):
    """Rows that W4A4 quantizes meet adapters as they are; gpt-oss has gate and up in turn, and biases; vLLM has another
    name for Mixtral's experts."""
    from peft import LoraConfig, get_peft_model

    from moe_nvfp4.quantize.convert import convert_checkpoint
    from moe_nvfp4.quantize.options import Options
    from tests.integrations.test_vllm import MOST, YARN, by_transformers, same
    from tests.integrations.vllm_engine import generate

    bf16, adapter = model / "bf16", model / "both"
    if form != "W4A4":
        family = gpt_oss if form == "gpt-oss" else mixtral
        bf16, adapter = folder(tmp_path, lambda: family(intermediate=96, head_dim=32, hidden_size=H)), tmp_path / "both"
        if family is gpt_oss:
            change_config(bf16, rope_parameters=YARN)
        config = LoraConfig(r=R, target_modules=[], target_parameters=BOTH, init_lora_weights=False)
        get_peft_model(load(bf16, torch.float32), config).save_pretrained(adapter)
    convert_checkpoint(bf16, tmp_path / "nvfp4", Options(activations="nvfp4" if form == "W4A4" else "bf16"))
    found = generate(tmp_path / "nvfp4", adapters=[adapter, None] * 4, **ON_EXPERTS)
    for first, chosen in enumerate((adapter, None)):
        want = by_transformers(tmp_path / "nvfp4", adapter=chosen)
        mine = [[each[first::2] for each in answers] for answers in (found, want)]
        same(*mine, prompts=MOST // 2 if form == "W4A4" else 4)


def test_new_weights_under_adapters(model, nvfp4, tmp_path):
    """Adapters stay as they are."""
    from moe_nvfp4.quantize.convert import convert_checkpoint
    from tests.integrations.test_vllm import by_transformers, same
    from tests.integrations.vllm_engine import generate

    (tmp_path / "bf16").mkdir()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "bf16" / name).write_bytes((model / "bf16" / name).read_bytes())
    g = torch.Generator().manual_seed(1)
    files = {n: t if t.dim() < 2 else (torch.randn(t.shape, generator=g) * t.float().std()).to(t.dtype)
             for n, t in tensors(model / "bf16").items()}  # fmt: skip
    save_file(files, tmp_path / "bf16" / "model.safetensors", {"format": "pt"})
    convert_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4", progress=False)
    found = generate(nvfp4, again=tmp_path / "nvfp4", adapters=[model / "both"] * 8, **ON_EXPERTS)
    same(found, by_transformers(tmp_path / "nvfp4", adapter=model / "both"))
