"""Weights that are loaded again in a running vLLM: the same bits, at the same addresses, as after a fresh start."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.folders import is_expert, is_linear, quantized
from tests.models import folder, qwen3_moe, tensors

pytest.importorskip("vllm", reason="needs vLLM, which .ci/run has in an environment of its own")

from moe_nvfp4.quantize.convert import convert_checkpoint  # noqa: E402
from moe_nvfp4.quantize.options import Options  # noqa: E402
from tests.integrations.test_vllm import same, tiny  # noqa: E402
from tests.integrations.vllm_engine import ask, engine, generate, on_two_ranks  # noqa: E402


def made(**options):
    def make(dense, path):
        convert_checkpoint(dense, path / "nvfp4", Options(**options), progress=False)
        return path / "nvfp4"

    return make


def w4a4(input_scale, experts_alone=False):
    """As another tool writes it, with a scale of its own for each matrix."""

    def make(dense, path):
        shutil.copytree(dense, path / "bf16")
        which = is_expert if experts_alone else lambda key: is_expert(key) or is_linear(key)
        left = ["lm_head", "*.gate"] + ["*self_attn*"] * experts_alone
        return quantized(path, None, "modelopt", which, input_scale, ignore=left)[0]

    return make


NAMES = ("one", "two")
FORMS = {  # form -> function that makes it, options of vLLM
    "experts": (made(dialect="compressed-tensors"), {}),
    "all": (made(linears="all"), {"hf_overrides": {"moe_nvfp4": {"cpu_experts": 1}}}),
    "w4a4": (w4a4(0.01), {}),
    "w4a4, dynamic": (w4a4(None), {}),
    "bf16": (lambda dense, path: dense, {"quantization": "moe_nvfp4"}),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Two folders of one model with different weights."""
    root = tmp_path_factory.mktemp("reload")
    folder(root, tiny(), "one")
    shutil.copytree(root / "one", root / "two")
    torch.manual_seed(1)
    files = {n: t if t.dim() < 2 else (torch.randn(t.shape) * t.float().std()).to(t.dtype)
             for n, t in tensors(root / "one").items()}  # fmt: skip
    save_file(files, root / "two" / "model.safetensors", metadata={"format": "pt"})
    return root


def ours(llm):
    """name -> (address, bytes) of every tensor of our layers."""

    def look(model):
        found = {}
        for name, module in model.named_modules():
            layers = getattr(module, "nvfp4", ())
            for i, layer in enumerate(layers if isinstance(layers, list) else [layers]):
                for key, p in layer.named_parameters() if isinstance(layer, torch.nn.Module) else ():
                    found[f"{name}.{i}.{key}"] = p.data_ptr(), p.view(torch.uint8).numpy().tobytes()
        return found

    (found,) = llm.apply_model(look)
    assert found
    return found


def load_again(llm, **weights):
    llm.collective_rpc("reload_weights", kwargs=weights)
    llm.reset_prefix_cache()


def by_layer(path):
    """The tensors of a folder, those of layer 0 first."""
    return sorted(tensors(path).items(), key=lambda item: "layers.0." not in item[0])


@pytest.mark.parametrize("form", FORMS)
def test_as_after_a_fresh_start(dense, tmp_path, form):
    """From files, and tensor by tensor as a trainer sends them: each layer is ready as soon as all of it has come, if
    that can be known: of static scales there may be none."""
    make, options = FORMS[form]
    for name in NAMES:
        (tmp_path / name).mkdir()
    paths = [make(dense / name, tmp_path / name) for name in NAMES]
    fresh = engine(paths[1], **options)
    want, answers = ours(fresh), ask(fresh)
    fresh.llm_engine.engine_core.shutdown()
    llm = engine(paths[0], **options)
    before, first = ours(llm), ask(llm)
    load_again(llm, weights_path=str(paths[1]))
    after = ours(llm)
    assert {name: place for name, (place, _) in after.items()} == {name: place for name, (place, _) in before.items()}
    assert {name: found for name, (_, found) in after.items()} == {name: found for name, (_, found) in want.items()}
    assert ask(llm) == answers != first

    layers = []

    def sent():
        for name, tensor in by_layer(paths[0]):
            if "layers.0." not in name and not layers:
                now = ours(llm)
                layers.extend(n for n in now if now[n] == before[n] != after[n])
            yield name, tensor

    load_again(llm, weights_iterator=sent())
    assert ours(llm) == before and ask(llm) == first
    ready = [name for name in before if ".layers.0." in name and before[name] != after[name]]
    assert ready and layers == ([] if form == "w4a4, dynamic" else ready)
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("make", [made(linears="attention"), w4a4(0.01, True), w4a4(None, True)],
                         ids=["w4a16", "w4a4", "w4a4, dynamic"])  # fmt: skip
def test_after_a_start_without_files(dense, tmp_path, make):
    """As a trainer's server, whose first weights are random: those that come are checked as any."""
    source, answers = make(dense / "one", tmp_path), []
    for options in ({}, {"load_format": "dummy"}):
        llm = engine(source, **options)
        answers.append(ask(llm))
        if options:
            assert answers[1] != answers[0]
            files = by_layer(source)
            load_again(llm, weights_iterator=iter(files))
            assert ask(llm) == answers[0]
            some = [item for item in files if not item[0].endswith("layers.1.mlp.experts.3.up_proj.weight_scale")]
            with pytest.raises(ValueError, match=r"up_proj\.weight_scale of expert 3 .* did not come"):
                load_again(llm, weights_iterator=iter(some))
        llm.llm_engine.engine_core.shutdown()


def test_a_tied_head(tmp_path):
    """On a CPU vLLM has a packed copy of it, and would go on with that of the old embedding."""
    paths = []
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        model = qwen3_moe(4, 64, head_dim=32, hidden_size=128, tie_word_embeddings=True)
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_()
        model.to(torch.bfloat16).save_pretrained(tmp_path / f"{name}-bf16")
        convert_checkpoint(tmp_path / f"{name}-bf16", path := tmp_path / name, progress=False)
        paths.append(path)
    assert generate(paths[0], again=paths[1]) == generate(paths[1])


def test_two_ranks(dense, tmp_path):
    """Each loads its channels again, or its experts: the answers of one rank with the new weights."""
    for name in NAMES:
        convert_checkpoint(dense / name, tmp_path / name, Options(linears="attention"), progress=False)
    options = {"tensor_parallel_size": 2, "again": str(tmp_path / "two")}
    forms = {"tensors": options, "experts": options | {"enable_expert_parallel": True}}
    found = on_two_ranks({form: (tmp_path / "one", given) for form, given in forms.items()}, tmp_path)
    want = generate(tmp_path / "two")
    for form in forms:
        for rank in found[form]:
            same(rank, want)


def test_other_forms(dense, tmp_path, monkeypatch):
    """A folder is refused before anything is replaced; tensors are when they come."""
    small = folder(tmp_path, tiny(intermediate=32), "small")
    forms = {"mine": {"linears": "attention"}, "experts": {}, "dialect": {"dialect": "compressed-tensors"},
             "all": {"linears": "all"}, "w4a4": {"linears": "attention", "activations": "nvfp4"},
             "small": {"linears": "attention"}}  # fmt: skip
    for name, options in forms.items():
        source = small if name == "small" else dense / "one"
        convert_checkpoint(source, tmp_path / f"{name}-4", Options(**options), progress=False)
    llm = engine(tmp_path / "mine-4")
    before, answers = ours(llm), ask(llm)
    refused = {
        dense
        / "one": r"0\.down_proj\.weight comes as dense, and .*0\.down_proj is NVFP4 of modelopt in the files with",
        tmp_path
        / "dialect-4": r"weight_global_scale comes as NVFP4 of compressed-tensors, and .* is NVFP4 of modelopt",
        tmp_path / "w4a4-4": r"w4a4-4 was made for activations 'nvfp4', and the files for 'bf16' with which",
        tmp_path / "all-4": r"lm_head\.weight_scale_2 comes as NVFP4 of modelopt, and lm_head is dense in the files",
        tmp_path / "experts-4": r"experts-4 lacks .*\.k_proj\.weight_scale_2, which .*mine-4 has",
        tmp_path / "small-4": r"0\.down_proj\.weight is \[128, 16\] in .*small-4, and \[128, 32\] in .*mine-4",
    }
    for path, message in refused.items():
        with pytest.raises(ValueError, match=f"{message}.*start the server again"):
            load_again(llm, weights_path=str(path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / name))
    with pytest.raises(ValueError, match="w4a4-4 was made for activations 'nvfp4'"):
        load_again(llm, weights_path="w4a4-4")  # a name on the Hub
    (tmp_path / "mine-4").rename(tmp_path / "kept")
    (tmp_path / "w4a4-4").rename(tmp_path / "mine-4")  # the server's own folder has other files by now
    for options in ({}, {"weights_path": str(tmp_path / "mine-4")}):
        with pytest.raises(ValueError, match="mine-4 was made for activations 'nvfp4', and the files for 'bf16' with"):
            load_again(llm, **options)
    (tmp_path / "mine-4").rename(tmp_path / "w4a4-4")
    (tmp_path / "kept").rename(tmp_path / "mine-4")
    assert ours(llm) == before and ask(llm) == answers
    with pytest.raises(ValueError, match="comes as NVFP4 of compressed-tensors"):
        load_again(llm, weights_iterator=iter(tensors(tmp_path / "dialect-4").items()))
    for part, named in ((".mlp.experts.3.up_proj", "experts.3.up_proj"), (".self_attn.k_proj", "k")):
        name = f"model.layers.0{part}.weight_scale_2"
        rounded = tensors(tmp_path / "mine-4") | {name: torch.tensor(0.1).bfloat16()}
        with pytest.raises(
            ValueError, match=rf"{named}.* is torch\.bfloat16 \[\], expected .*that is rounded is another"
        ):
            load_again(llm, weights_iterator=iter(rounded.items()))
    llm.llm_engine.engine_core.shutdown()


def test_4_bit_linears_for_dense_ones(dense, tmp_path):
    """As vLLM's weight transfer hands them over, past `reload_weights`."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    def transfer(model):
        initialize_layerwise_reload(model)
        model.load_weights(files)

    for name, linears in (("one", ()), ("two", "attention")):
        convert_checkpoint(dense / name, tmp_path / name, Options(linears=linears), progress=False)
    llm = engine(tmp_path / "one")
    files = [(name, tensor) for name, tensor in tensors(tmp_path / "two").items() if "self_attn" in name]
    message = r"self_attn\.\w+\.weight comes as torch\.uint8 \[\d+, 64\], and is dense .* start the server again with"
    with pytest.raises(ValueError, match=message):
        llm.apply_model(transfer)
    llm.llm_engine.engine_core.shutdown()


def test_what_is_refused(dense, tmp_path, monkeypatch):
    """Tensors outside of a reload; to save what vLLM has not; a layer of which one is missing."""
    (tmp_path / "one").mkdir()
    path = made(linears="attention")(dense / "one", tmp_path / "one")
    llm = engine(path)
    before = ours(llm)
    files = tensors(path)
    for part, name in ((".experts.", r"w2_weight"), ("o_proj.weight", r"o_proj\.weight")):
        with pytest.raises(NotImplementedError, match=rf"{name} comes outside of a reload.*reload_weights"):
            llm.apply_model(lambda model, part=part: model.load_weights(t for t in files.items() if part in t[0]))
    (tmp_path / "saved").mkdir()
    with pytest.raises(NotImplementedError, match="4-bit weights .* are not saved from vLLM: serve the folder"):
        llm.llm_engine.engine_core.engine_core.save_sharded_state(str(tmp_path / "saved"))
    with monkeypatch.context() as older:  # vLLM 0.26
        older.setattr("vllm.model_executor.model_loader.reload.utils.get_layer_size",
                      lambda layer: sum(p.numel() for p in layer.parameters()))  # fmt: skip
        with pytest.raises(NotImplementedError, match="as soon as its parameters are full, .* 0.31 or newer"):
            load_again(llm, weights_path=str(path))
    with pytest.raises(
        NotImplementedError, match="is_checkpoint_format=False: 4-bit layers keep their weights in a layo"
    ):
        load_again(llm, weights_iterator=iter(files.items()), is_checkpoint_format=False)
    missing = "model.layers.1.mlp.experts.3.up_proj.weight_scale_2"
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: up_proj\.weight_scale_2 of expert 3 .* verify"):
        load_again(llm, weights_iterator=iter([item for item in files.items() if item[0] != missing]))
    assert ours(llm) == before  # what has come of the layer has not replaced anything
    llm.llm_engine.engine_core.shutdown()


def left_out(name):
    return lambda files: [item for item in files if item[0] != name]


def cut_off(files):
    yield from files[: len(files) // 2]
    raise ConnectionError("the trainer is gone")


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight_scale_2"
FAILURES = {  # what is sent, and the error
    "an expert": (left_out(EXPERT), r"up_proj\.weight_scale_2 of expert 3 .* did not come"),
    "a part of a dense linear": (left_out("model.layers.1.self_attn.k_proj.weight"),
                                 r"1\.self_attn\.qkv_proj\.weight: all or a part did not come"),
    "a norm of another size": (lambda files: [(n, t[:64] if "layers.1.input_layernorm" in n else t) for n, t in files],
                               "Attempted to load weight"),
    "half": (cut_off, "the trainer is gone"),
}  # fmt: skip


def test_after_a_failure(dense, tmp_path):
    """Requests are refused, which new and old weights would answer together; loading all of them makes it good, and
    those that were new must be among them."""
    for name in NAMES:
        convert_checkpoint(dense / name, tmp_path / name, Options(), progress=False)
    fresh = engine(tmp_path / "two")
    want = ask(fresh)
    fresh.llm_engine.engine_core.shutdown()
    llm = engine(tmp_path / "one")
    files = by_layer(tmp_path / "two")
    for change, message in FAILURES.values():
        with pytest.raises(Exception, match=message):
            load_again(llm, weights_iterator=iter(change(files)))
        with pytest.raises(ValueError, match="had new weights when loading failed, and did not come now"):
            load_again(llm, weights_iterator=iter(left_out("model.layers.0.self_attn.o_proj.weight")(files)))
        load_again(llm, weights_iterator=iter(files))
        assert ask(llm) == want
        load_again(llm, weights_path=str(tmp_path / "one"))
    with pytest.raises(ValueError):
        load_again(llm, weights_iterator=iter(left_out(EXPERT)(files)))
    with pytest.raises(RuntimeError, match="some may be new and others old, which answers no request"):
        ask(llm)
    llm.llm_engine.engine_core.shutdown()


def test_checksums(dense, tmp_path):
    """vLLM's, by which a trainer knows whether its weights have come, and the reset that makes sure of it, count 4-bit
    weights."""
    pytest.importorskip("vllm.model_executor.model_loader.weight_checksum")  # new in vLLM 0.32
    for name in NAMES:
        convert_checkpoint(dense / name, tmp_path / name, Options(linears="attention"), progress=False)
    llm = engine(tmp_path / "one")
    checksums = lambda: llm.collective_rpc("compute_weight_checksums")[0]
    before, answers = checksums(), ask(llm)
    names = [name for name in before if ".nvfp4." in name]
    assert len(names) == len(ours(llm))
    kept = llm.collective_rpc(lambda worker: set(worker._get_sleep_parameters(worker.get_model())))[0]
    assert {name.partition(":")[2].rpartition(":")[2] for name in names} <= kept
    load_again(llm, weights_path=str(tmp_path / "two"))
    changed = [name for name, found in checksums().items() if found != before[name]]
    assert {name for name in names if name.endswith(("proj", "weight", "_sf"))} <= set(changed)
    llm.collective_rpc("reset_weights")
    assert not any(map(any, (found for _, found in ours(llm).values())))
    load_again(llm, weights_path=str(tmp_path / "one"))
    assert checksums() == before and ask(llm) == answers
    llm.llm_engine.engine_core.shutdown()


def test_dense_experts_by_weight_transfer(dense, tmp_path):
    """vLLM's weight transfer, by which a trainer sends weights, hands them to the model itself."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    def send(worker):
        initialize_layerwise_reload(worker.get_model())
        worker.get_model().load_weights(tensors(dense / "two").items())

    convert_checkpoint(dense / "one", tmp_path / "nvfp4", Options(dialect="compressed-tensors"), progress=False)
    llm = engine(tmp_path / "nvfp4")
    with pytest.raises(ValueError, match="down_proj comes as torch.bfloat16, and is NVFP4 of compressed-tensors"):
        llm.collective_rpc(send)
    llm.llm_engine.engine_core.shutdown()


def test_a_weight_transfer_that_fails(dense, tmp_path):
    """To end it twice does not make it good; to begin another one does."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import reload

    class FromHere(WeightTransferEngine):
        init_info_cls = update_info_cls = dict
        init_transfer_engine = shutdown = lambda self, *_: None

        def start_weight_update(self):
            reload.initialize_layerwise_reload(self.model)

        def receive_weights(self, update):
            self.model.load_weights(sent)

        def finish_weight_update(self):
            reload.finalize_layerwise_reload(self.model, self.model_config)

    if "here" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("here", FromHere)
    for name in NAMES:
        convert_checkpoint(dense / name, tmp_path / name, Options(), progress=False)
    fresh = engine(tmp_path / "two")
    want = ask(fresh)
    fresh.llm_engine.engine_core.shutdown()
    llm = engine(tmp_path / "one", weight_transfer_config=WeightTransferConfig(backend="here"))
    files = by_layer(tmp_path / "two")
    call = lambda name, *args: llm.collective_rpc(name, args=args)
    for sent in (left_out(EXPERT)(files), files):
        call("start_weight_update")
        call("update_weights", {})
        if sent is files:
            call("finish_weight_update")
            assert ask(llm) == want
        else:
            with pytest.raises(ValueError, match="expert 3 .* did not come"):
                call("finish_weight_update")
            with pytest.raises(RuntimeError, match="without a matching start"):
                call("finish_weight_update")
            with pytest.raises(ValueError, match="failed before: begin once more, with all weights"):
                llm.apply_model(lambda model: reload.finalize_layerwise_reload(model, None))
    llm.llm_engine.engine_core.shutdown()


def test_files_that_are_converted_are_not_loaded_again():
    """vLLM's loader would hand over what they hold, FP8 or MXFP4."""
    from moe_nvfp4.integrations.vllm import NAME
    from moe_nvfp4.integrations.vllm import reload as internals

    config = SimpleNamespace(get_name=lambda: NAME, converted=object(), form="FP8", info=None)
    runner, seen = SimpleNamespace(vllm_config=SimpleNamespace(quant_config=config)), []
    reload = internals._checking(lambda self, iterator, *rest: seen.append(list(iterator)))
    with pytest.raises(
        NotImplementedError, match="the files were FP8, which is converted once, when the server starts"
    ):
        reload(runner, weights_path="somewhere")
    item = "model.norm.weight", torch.ones(3)
    reload(runner, weights_iterator=iter([item]))
    assert seen == [[item]]
