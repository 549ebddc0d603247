"""Experts on the CPU beside a GPU, without a GPU: the order of the stream's work, and graphs."""

import copy
import ctypes
import gc
import pickle
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from os import truncate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from moe_nvfp4 import backends, experts, ready
from moe_nvfp4 import mapped as mapped_files
from moe_nvfp4.backends import PACKAGES, Device, Problem
from moe_nvfp4.kernels.calls import Call
from moe_nvfp4.kernels.cpu import backend as cpu
from moe_nvfp4.kernels.offload import backend as offload
from moe_nvfp4.kernels.offload import files, pages, upload
from moe_nvfp4.weights import Gate
from tests.common import THRESHOLDS, random_layer, relative_error
from tests.kernels.test_mapped import in_files

needs_library = pytest.mark.skipif(not cpu.available(), reason="no C compiler")
A100 = Device("cuda", "A100", (8, 0), frozenset({"triton"}))
SIZES = dict(E=6, H=64, I=48)


# ---------------------------------------------------------------- who runs it


@needs_library
def test_it_runs_beside_nvidia_gpus_or_says_why_not(monkeypatch):
    """Whatever MOE_NVFP4_BACKEND says, which is about weights where x is."""
    monkeypatch.setenv("MOE_NVFP4_BACKEND", "portable")
    batch, layer = inputs(3, 0), random_layer(**SIZES).keep_on_cpu()
    with pytest.raises(
        NotImplementedError, match="experts on the CPU, x on cpu: offload runs beside NVIDIA GPUs; or m"
    ):
        experts.run_beside(*batch, layer._number)
    monkeypatch.setattr(Device, "of", staticmethod(lambda d: A100))
    assert experts._kernels(torch.device("cuda")) is offload and experts.beside(A100) == "experts kept on the CPU"
    monkeypatch.setattr(cpu, "missing", lambda: "cannot be compiled (no cc): install a C compiler")
    with pytest.raises(NotImplementedError, match="A100.*computes with the CPU kernels.*install a C compiler; or move"):
        experts.run_beside(*batch, layer._number)


def test_moving_a_model_leaves_them_on_the_cpu():
    """`module.to` asks for an empty tensor only, to learn device and dtype, and no weight leaves the CPU."""
    layer = random_layer(**SIZES, bias=torch.bfloat16).keep_on_cpu()
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    asked = []

    def to_gpu(t):
        asked.append(t.numel())
        return SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16 if t.is_floating_point() else t.dtype)

    layer._apply(to_gpu)
    assert set(asked) == {0}
    for name, t in layer.state_dict().items():
        assert t.device.type == "cpu" and torch.equal(t.to(before[name].dtype), before[name]), name
    assert layer.down_proj_bias.dtype == torch.float16 and layer.down_proj_global_scale.dtype == torch.float32
    assert layer.to("meta").down_proj.is_meta


@needs_library
def test_a_layer_takes_x_on_a_gpu_if_it_was_told_to_stay(monkeypatch):
    monkeypatch.setattr(Device, "of", staticmethod(lambda d: A100 if d.type == "cuda" else Device(d.type)))
    backends.forget()
    layer, stays = random_layer(**SIZES), random_layer(**SIZES).keep_on_cpu()
    biased = random_layer(**SIZES, bias=torch.bfloat16).keep_on_cpu()
    raw = random_layer(**SIZES, gate=Gate("raw")).keep_on_cpu()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, SIZES["H"], dtype=torch.bfloat16, device="cuda")
        ids, p = torch.zeros(3, 2, dtype=torch.long, device="cuda"), torch.ones(3, 2, device="cuda")
        with pytest.raises(ValueError, match=r"w13.codes is on cpu.*keep_on_cpu\(\)"):
            torch.ops.moe_nvfp4.experts(x, ids, p, None, None, layer.weights.tensors(), layer.weights.spec("portable"))
        y = stays(x, ids, p)
        assert y.device.type == "cuda" and y.shape == x.shape and y.dtype == x.dtype
        with pytest.raises(ValueError, match="top_k_index is on cpu"):
            stays(x, ids.cpu(), p)
        there = []
        monkeypatch.setattr("moe_nvfp4.layer.run_experts", lambda x, *_: there.append(x.device.type) or x)
        biased(x, ids, p)
        biased.down_proj_bias.requires_grad_()
        biased(x, ids, p)
        with torch.no_grad():
            biased(x, ids, p)
        assert there == ["cpu"]  # where a bias is trained
        raw(x, ids, p)
        assert there == ["cpu"] * 2  # and where the model's own gate runs
    backends.forget()


@needs_library
def test_torch_compile_sees_no_tensors_of_the_cpu(monkeypatch):
    """With one among its inputs it would make no CUDA graph. New weights make new compiled code."""
    monkeypatch.setattr(Device, "of", staticmethod(lambda d: A100 if d.type == "cuda" else Device(d.type)))
    backends.forget()
    layer, made = random_layer(**SIZES).keep_on_cpu(), []

    def note(graph, inputs):
        made.append([t.device.type for t in inputs])
        return graph.forward

    torch.compiler.reset()  # other tests compile the same code, and torch compiles it only so often
    compiled = torch.compile(layer, backend=note, fullgraph=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, SIZES["H"], dtype=torch.bfloat16, device="cuda")
        batch = x, torch.zeros(3, 2, dtype=torch.long, device="cuda"), torch.ones(3, 2, device="cuda")
    for graphs, change in enumerate((lambda: None, *ways_to_change(layer)), 1):
        change()
        with FakeTensorMode(allow_non_fake_inputs=True):
            for _ in range(2):
                compiled(*batch)
        assert made == [["cuda"] * 3] * graphs
    backends.forget()


def ways_to_change(layer):
    """Functions that put other weights into `layer`, or move the same ones elsewhere."""
    other = random_layer(**SIZES, seed=1).state_dict()
    return (
        lambda: layer.load_state_dict(other, assign=True),
        lambda: layer.to(torch.float16),
        lambda: layer.keep_on_cpu(False).keep_on_cpu(),
        lambda: setattr(layer, "down_proj", torch.nn.Parameter(layer.down_proj.data.clone(), requires_grad=False)),
    )


@needs_library
def test_an_op_finds_the_weights_by_the_number_of_its_layer(monkeypatch):
    """It finds the layer's present weights; every copy or layer has its own number. It keeps no weights alive."""
    monkeypatch.setattr(
        experts, "_kernels", lambda device: SimpleNamespace(experts=lambda *args: cpu.experts(*args[:4]))
    )
    layers, batch = [random_layer(**SIZES, seed=i).keep_on_cpu() for i in range(2)], inputs(3, 0)
    layers += [copy.deepcopy(layers[0]), copy.copy(layers[0]), pickle.loads(pickle.dumps(layers[0]))]
    layers[2].down_proj_global_scale.data *= 2
    layers[4].down_proj_global_scale.data *= 4

    def check_each():
        found = []
        for layer in layers:
            found.append(experts.run_beside(*batch, layer._number))
            assert torch.equal(found[-1], cpu.experts(*batch, layer.weights))
        return found

    first, second, twice, same, four_times = check_each()
    assert torch.equal(same, first) and torch.equal(twice, 2 * first) and torch.equal(four_times, 4 * first)
    assert not torch.equal(second, first)
    for change in ways_to_change(layers[0]):
        change()
        check_each()
    layers[1].load_state_dict(layers[2].state_dict())  # into the memory of those before
    assert torch.equal(check_each()[1], twice)
    numbers, weights = [layer._number for layer in layers], [weakref.ref(layer.down_proj) for layer in layers]
    assert len(set(numbers)) == len(layers)
    del change
    layers.clear()
    gc.collect()
    assert not any(number in experts._layers for number in numbers) and not any(w() is not None for w in weights)


# ---------------------------------------------------------------- the stream, played by a list


class Driver:
    """CUDA's driver for one stream, whose work is delayed until `synchronize`, or recorded as a graph."""

    def __init__(self, mail):
        self.mail = mail
        self.work, self.graph, self.graphs, self.owners = [], None, 0, []

    def begin_capture(self):
        self.work_before, self.work, self.graphs = self.work, [], self.graphs + 1
        self.graph = self.graphs

    def end_capture(self):
        graph, self.work, self.graph = self.work, self.work_before, None
        return graph

    def synchronize(self):
        for work in self.work:
            work()
        self.work = []

    def cuMemcpyAsync(self, to, source, size, stream):
        self.work.append(lambda: ctypes.memmove(to, source, size.value))
        return 0

    def cuLaunchHostFunc(self, stream, function, argument):
        self.work.append(lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)(argument))
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = attribute == 122 and self.mail
        return 0

    def cuStreamWriteValue64_v2(self, stream, address, value, flags):
        self.work.append(lambda: setattr(ctypes.c_int64.from_address(address.value), "value", value.value))
        return 0

    def cuStreamWaitValue64_v2(self, stream, address, value, flags):
        def wait():
            until = time.monotonic() + 20
            while ctypes.c_int64.from_address(address.value).value != value.value:
                assert time.monotonic() < until, "nobody answers"

        assert flags == 1  # equal
        self.work.append(wait)
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream, status, capture, graph, *_):
        status._obj.value, capture._obj.value = self.graph is not None, self.graph or 0
        graph._obj.value = 1000 + (self.graph or 0)
        return 0

    def cuUserObjectCreate(self, owner, argument, release, count, flags):
        self.owner = lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(release.value)(argument)
        return 0

    def cuGraphRetainUserObject(self, graph, owner, count, flags):
        self.owners.append(self.owner)
        return 0 if graph.value == 1000 + self.graph else 1


@pytest.fixture(params=[True, False], ids=["mail", "host function"])
def driver(request, monkeypatch):
    driver = Driver(request.param)
    monkeypatch.setattr(offload, "_driver", lambda: driver)
    monkeypatch.setattr(offload, "_allocate_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    for name, empty in (("_streams", {}), ("_graphs", []), ("_mailboxes", [])):
        monkeypatch.setattr(offload, name, empty)
    return driver


def inputs(T, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, SIZES["H"], generator=generator).bfloat16()
    return x, torch.randint(-1, SIZES["E"] + 1, (T, 2), generator=generator), torch.rand(T, 2, generator=generator)


@needs_library
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_calls_of_a_stream_share_its_memory(driver, activations):
    """Many calls of all sizes wait for their turn together, twice, and give the CPU backend's bits."""
    layers = [random_layer(**SIZES, activations=activations, seed=i).weights for i in range(2)]
    for _ in range(2):
        batches = [(inputs(T, T), layers[T % 2]) for T in (1, 30, 2, 0, 70, 70, 3)]
        results = [offload.experts(*batch, w) for batch, w in batches]
        driver.synchronize()
        for (batch, w), y in zip(batches, results, strict=True):
            assert torch.equal(y, cpu.experts(*batch, w))
    y = offload.experts(*batches[0][0], layers[0])
    (workspace,) = offload._streams.values()
    assert len(workspace.calls) == 1  # those that have run are gone
    *before, copy_y = driver.work
    for work in before:
        work()
    driver.work, memory, batch = [copy_y], weakref.ref(workspace.buffers[3]), inputs(900, 0)
    z = offload.experts(*batch, layers[0])  # takes larger memory, while y is still to come out of this
    assert memory() is not None and memory() is not workspace.buffers[3]
    driver.synchronize()
    assert torch.equal(y, cpu.experts(*batches[0][0], layers[0])) and torch.equal(z, cpu.experts(*batch, layers[0]))


@needs_library
def test_the_gpu_works_between_question_and_answer(driver, monkeypatch):
    """What `meanwhile` launches lies in the stream after the CPU was asked, and before the stream waits for it."""
    layer, batch = random_layer(**SIZES).keep_on_cpu(), inputs(5, 0)
    kinds = lambda: [work.__qualname__.split(".")[1] for work in driver.work]
    monkeypatch.setattr(experts, "_kernels", lambda device: offload)
    before = []
    with torch.no_grad():
        y = experts.run_beside(*batch, layer._number, lambda: before.append(kinds()))
    down = ["cuMemcpyAsync"] * 3
    assert before == [[*down, "cuStreamWriteValue64_v2"]] * driver.mail
    assert kinds()[len(before[0]) if before else 3 :] == (
        ["cuStreamWaitValue64_v2"] if driver.mail else ["cuLaunchHostFunc"]
    ) + ["cuMemcpyAsync"]
    driver.synchronize()
    assert torch.equal(y, cpu.experts(*batch, layer.weights))

    def breaks():
        raise RuntimeError("no memory")

    with torch.no_grad():
        for _ in range(2) if driver.mail else ():
            with pytest.raises(RuntimeError, match="no memory"):
                experts.run_beside(*batch, layer._number, breaks)
            assert kinds()[-1] == "cuStreamWaitValue64_v2"
        y = experts.run_beside(*batch, layer._number)
    z = experts.run_beside(*batch, layer._number, breaks)  # with gradients nothing is done meanwhile
    driver.synchronize()
    for found in (y, z):
        assert torch.equal(found, cpu.experts(*batch, layer.weights))


def best(x, router, k):
    """The ids of the k largest of x · routerᵀ, by a loop in float64."""
    scores = [sum(a * b for a, b in zip(x[0].tolist(), row, strict=True)) for row in router.tolist()]
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


@needs_library
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_graphs_the_cpu_guesses_the_next_layers_experts(driver, dtype, activations):
    """After a layer of one token it chooses by the next router, from this layer's x, and no result changes. A call
    whose guess is still being read is not released."""
    layers = [random_layer(**SIZES, activations=activations, seed=i).weights for i in range(3)]
    draw = lambda i, *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(i))
    address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
    routers = [draw(i, SIZES["E"], SIZES["H"]).bfloat16() for i in range(3)]
    one, two = ([(x.to(dtype), ids, p) for x, ids, p in (inputs(T, i) for i in range(3))] for T in (1, 2))
    given = [*zip(one, layers, routers, strict=True), (two[0], layers[0], routers[0]), (one[0], layers[0], routers[0]),
             (one[1], layers[1], None), (one[2], layers[2], routers[2])]  # fmt: skip
    driver.begin_capture()
    y = [offload.experts(*batch, w, router=router) for batch, w, router in given]
    graph, (workspace,) = driver.end_capture(), offload._graphs
    calls, each = workspace.calls, len(graph) // len(given)
    assert [call.guessed is not None for call in calls] == [True, True] + [False] * 5
    for step in range(3):
        for i, call in enumerate(calls):
            x = given[i][0][0]
            x.copy_(draw(step, *x.shape))
            driver.work = graph[i * each : (i + 1) * each]
            driver.synchronize()
            until = time.monotonic() + 20
            while call._call.guessing and time.monotonic() < until:
                time.sleep(1e-4)
            # Other libraries (for fp16, on CPUs with AVX-512 BF16) have threads of their own, and do not guess.
            if call.guessed is not None and driver.mail and call.function == address(workspace.mailbox.library.call):
                assert call.guessed.tolist() == best(x, routers[i + 1], 2)
            assert torch.equal(y[i], cpu.experts(*given[i][0], given[i][1])), i
    for release in driver.owners:  # the graph is gone
        release()
    calls[0]._call.guessing = 1
    assert not calls[0].released and not workspace.over
    calls[0]._call.guessing = 0
    assert workspace.over


@needs_library
def test_a_router_that_is_no_such_matrix_guesses_nothing():
    gate = torch.nn.Linear(64, 6, bias=False)
    router = experts.RouterCopy(gate, "weight")
    assert router.on_cpu(6, 48) is None and router.on_cpu(7, 64) is None
    first = router.on_cpu(6, 64)
    assert torch.equal(first, gate.weight.bfloat16()) and router.on_cpu(6, 64) is first
    gate.weight = torch.nn.Parameter(gate.weight + 1)
    assert torch.equal(router.on_cpu(6, 64), gate.weight.bfloat16())
    assert torch.equal(copy.deepcopy(router).on_cpu(6, 64), gate.weight.bfloat16())
    gate.to("meta")
    assert torch.equal(router.on_cpu(6, 64), router._copy[1])


@needs_library
def test_a_graph_runs_as_often_as_one_likes(driver):
    w = random_layer(**SIZES).weights
    x, ids, p = inputs(9, 0)
    driver.begin_capture()
    y = offload.experts(x, ids, p, w)
    z = offload.experts(y, ids, p, w)
    graph = driver.end_capture()
    (first,) = offload._graphs
    assert len(first.calls) == 2 and (first.mailbox is not None) == driver.mail
    for seed in range(3):
        eager = inputs(40, 100 + seed)
        other = offload.experts(*eager, w)  # has other memory: it may run between the graph's
        for t, new in zip((x, ids, p), inputs(9, seed), strict=True):
            t.copy_(new)
        driver.work = [*driver.work[:2], *graph, *driver.work[2:]]
        driver.synchronize()
        want = cpu.experts(x, ids, p, w)
        assert torch.equal(y, want) and torch.equal(z, cpu.experts(want, ids, p, w))
        assert torch.equal(other, cpu.experts(*eager, w))
    for release in driver.owners:  # the graph is gone
        release()
    driver.begin_capture()
    offload.experts(x, ids, p, w)
    driver.end_capture()  # never runs
    (second,) = offload._graphs
    assert len(second.calls) == 1 and second.mailbox is first.mailbox


@needs_library
def test_the_graphs_of_a_server_share_memory(driver, monkeypatch):
    """They are replayed in any order, but one after the other. A buffer that became too small stays for those that know
    it. Threads are as many as the server has said, whatever torch's number is."""
    made = cpu.Call
    monkeypatch.setattr(offload, "_served_by", None)
    monkeypatch.setattr(offload, "_served", {})
    monkeypatch.setattr(offload, "cores", lambda: 9)
    given = []
    monkeypatch.setattr(cpu, "Call", lambda *args: given.append(args[-1]) or made(*args))
    offload.serve(5)
    layers, graphs = [random_layer(**SIZES, seed=i).weights for i in range(2)], []
    for T in (2, 60, 9):
        batch = inputs(T, T)
        driver.begin_capture()
        y = offload.experts(*batch, layers[0])
        z = offload.experts(y, *batch[1:], layers[1])
        graphs.append((driver.end_capture(), batch, y, z))
    (workspace,) = offload._served.values()
    assert offload._graphs == [] and len(workspace.calls) == 6 and set(given) == {5} != {torch.get_num_threads()}
    for seed, i in enumerate((1, 0, 2, 0, 1)):
        graph, batch, _, z = graphs[i]
        for t, new in zip(batch, inputs(len(z), 20 + seed), strict=True):
            t.copy_(new)
        other = inputs(40, seed)
        eager = offload.experts(*other, layers[0])
        driver.work += graph
        driver.synchronize()
        assert torch.equal(z, cpu.experts(cpu.experts(*batch, layers[0]), *batch[1:], layers[1]))
        assert torch.equal(eager, cpu.experts(*other, layers[0]))
    for release in driver.owners[2:]:  # two graphs are gone
        release()
    driver.begin_capture()
    offload.experts(*inputs(3, 0), layers[0])
    driver.end_capture()
    assert len(workspace.calls) == 3 and list(offload._served.values()) == [workspace]


@needs_library
def test_without_mailboxes_it_is_a_host_function(driver, monkeypatch):
    def none_left(memory):
        raise OSError

    monkeypatch.setattr(cpu, "Mailbox", none_left)
    w, batch = random_layer(**SIZES).weights, inputs(3, 0)
    y = offload.experts(*batch, w)
    driver.synchronize()
    assert torch.equal(y, cpu.experts(*batch, w)) and offload._streams[None, 7].mailbox is None


@pytest.mark.slow
@needs_library
def test_a_process_with_mailboxes_ends_well():
    """Returning memory to the system while a thread still reads it would be a segmentation fault."""
    code = (
        "import torch\nfrom moe_nvfp4.kernels.cpu import backend as cpu\n"
        "cpu.Mailbox(torch.empty(1 << 24, dtype=torch.int64)[:1])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True)
    assert run.returncode == 0, run.stderr


def test_what_fails_is_nan_and_the_next_call_says_why(driver):
    w = random_layer(**SIZES).weights
    x, ids, p = inputs(3, 0)
    ids[1, 1] = 9
    y = offload.experts(x, ids, p, w)
    driver.synchronize()
    assert y.isnan().all()
    with pytest.raises(ValueError, match="in an earlier call, whose result is NaN: expert ids must lie in"):
        offload.experts(x, ids, p, w)
    offload.check()


@needs_library
def test_weights_that_stay_in_files(driver, tmp_path):
    """If the file is gone, the result is NaN."""
    layer = random_layer(**SIZES)
    mapped, (file, _) = in_files(layer, tmp_path)
    batch = inputs(70, 0)
    y = offload.experts(*batch, mapped.weights)
    driver.synchronize()
    assert torch.equal(y, cpu.experts(*batch, layer.weights))
    truncate(file, 0)
    y = offload.experts(*batch, mapped.weights)
    driver.synchronize()
    assert y.isnan().all()
    with pytest.raises(OSError, match=f"in an earlier call, whose result is NaN: {file} became shorter"):
        offload.check()


@pytest.mark.slow_after(1)
@needs_library
@pytest.mark.parametrize("files", [False, True])
def test_weights_stay_until_the_call_that_reads_them_has_run(driver, tmp_path, files):
    """Though their layer is gone: the CPU would read memory that is not there."""
    layer, other, batch = random_layer(**SIZES), random_layer(**SIZES).weights, inputs(3, 0)
    want = cpu.experts(*batch, layer.weights)
    if files:
        layer, _ = in_files(layer, tmp_path)
        there = [weakref.ref(file) for file in mapped_files.opened() if file.path.parent == tmp_path]
        gone = lambda: [ref() is None for ref in there]
    else:
        there = [StorageWeakRef(t.untyped_storage()) for t in layer.parameters()]
        gone = lambda: [ref.expired() for ref in there]
    y = offload.experts(*batch, layer.weights)
    del layer
    gc.collect()
    assert there and not any(gone())
    driver.synchronize()
    assert torch.equal(y, want)
    offload.experts(*batch, other)
    gc.collect()
    assert all(gone())


def test_a_driver_that_refuses_is_an_error(monkeypatch):
    answers, used = [900, 201, 0, 201, 201], []
    monkeypatch.setattr(offload, "_driver", lambda: SimpleNamespace(cuLaunchHostFunc=lambda *_: answers.pop(0)))
    monkeypatch.setattr(offload, "use_context", used.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(RuntimeError, match="cuLaunchHostFunc failed with CUDA driver error 900"):
        offload._do("cuLaunchHostFunc", 1, 2, 3)
    assert not used
    offload._do("cuLaunchHostFunc", 1, 2, 3)  # in a thread that has used no GPU so far
    assert used == [1]
    with pytest.raises(RuntimeError, match="driver error 201"):
        offload._do("cuLaunchHostFunc", 1, 2, 3)


# ---------------------------------------------------------------- many tokens, and where weights lie


class Portable:
    """Stands for the portable backend, on the CPU."""

    def __init__(self, reason=None):
        self.reason, self.seen, self.experts_of_calls = reason, [], []

    def unavailable(self, device):
        return None

    def unsupported(self, device, problem):
        assert problem == Problem("experts", 6, 64, 48, "silu", "bf16", torch.bfloat16)
        return self.reason

    def experts(self, x, ids, p, weights):
        self.seen.append(x.shape[0])
        self.experts_of_calls.append(weights.num_experts)
        return cpu.experts(x, ids, p, weights)


@needs_library
@pytest.mark.parametrize("reason", [None, "takes none"])
def test_the_gpu_takes_many_tokens(driver, monkeypatch, reason):
    """From UPLOAD tokens per expert on, if the portable backend supports them."""
    w, T = random_layer(**SIZES).weights, offload.UPLOAD_WITHOUT_AMX * SIZES["E"] // 2  # two slots a token
    monkeypatch.setattr(offload, "PORTABLE", Portable(reason))
    monkeypatch.setattr(offload, "UPLOAD", offload.UPLOAD_WITHOUT_AMX)  # on every CPU
    batches = [inputs(n, n) for n in (T - 1, T, T + 1)]
    results = [offload.experts(*batch, w) for batch in batches]
    driver.synchronize()
    assert offload.PORTABLE.seen == ([] if reason else [T, T + 1])
    for batch, y in zip(batches, results, strict=True):
        assert torch.equal(y, cpu.experts(*batch, w))


@needs_library
def test_the_cpu_takes_padding_and_what_is_captured(driver, monkeypatch):
    """Slots without an expert are not counted; and a graph cannot copy from scales that are not pinned."""
    monkeypatch.setattr(offload, "UPLOAD", offload.UPLOAD_WITHOUT_AMX)  # on every CPU
    w, T = random_layer(**SIZES).weights, offload.UPLOAD * SIZES["E"]
    monkeypatch.setattr(offload, "PORTABLE", portable := Portable())
    batch = inputs(T, 0)
    for routed, captured, copies in ((T - 1, False, 0), (T, False, 1), (T, True, 1), (None, True, 1), (None, False, 2)):
        monkeypatch.setattr(offload, "capturing", lambda device, captured=captured: captured)
        y = offload.experts(*batch, w, routed)
        driver.synchronize()
        assert len(portable.seen) == copies and torch.equal(y, cpu.experts(*batch, w))


def test_kernels_for_copied_weights_are_compiled_ahead(monkeypatch):
    """Beside a GPU that has them: those of the backend that multiplies by copied weights."""
    gpus = {i: Device("cuda", name, capability, frozenset(PACKAGES))
            for i, (name, capability) in enumerate((("H100", (9, 0)), ("V100", (7, 0))))}  # fmt: skip
    real, compiled = Device.of, []
    monkeypatch.setattr(Device, "of", lambda device: gpus[device.index] if device.type == "cuda" else real(device))
    monkeypatch.setattr(ready.Gpu, "of", lambda device: device)
    monkeypatch.setattr(ready, "compile_ahead", lambda calls, gpu: compiled.append((calls, gpu)) or len(calls))
    monkeypatch.setenv("MOE_NVFP4_COMPILE", "ahead")
    layers = [random_layer(**SIZES), random_layer(**SIZES).keep_on_cpu()]
    gpu = torch.device("cuda", 0)
    assert ready.prepare(torch.nn.ModuleList(layers), 2, beside=gpu) == 1
    [([(backend, call)], where)] = compiled
    assert backend is offload.PORTABLE and call.top_k == 2 and where == gpu
    assert call.weights == Call.of(layers[1].weights, torch.bfloat16, 2).weights
    assert ready.prepare(layers[1], 2) == ready.prepare(layers[1], 2, beside=torch.device("cuda", 1)) == 0
    assert ready.prepare(layers[1], None, beside=gpu) == 0
    compiled.clear()
    assert ready.prepare(layers[1], 2, beside=gpu, adapters=(5, 3), expert_map=True) == 1
    [([(_, call)], _)] = compiled
    assert call.adapters == (8, 3) and call.expert_map and call.fused
    layers[1].post_expert_norm = torch.nn.Identity()
    assert ready.prepare(layers[1], 2, beside=gpu) == 1 and not compiled[-1][0][0][1].fused
    monkeypatch.setenv("MOE_NVFP4_COMPILE", "lazy")
    assert ready.prepare(layers[1], 2, beside=gpu) == 0
    monkeypatch.setenv("MOE_NVFP4_COMPILE", "later")
    with pytest.raises(ValueError, match="MOE_NVFP4_COMPILE=later is unknown: ahead or lazy"):
        ready.prepare(layers[1], 2)


@needs_library
@pytest.mark.parametrize("share, of_experts", [(1 / 2, [3, 3]), (1 / 4, [2, 2, 2]), (0.26, [2, 2, 2]), (0, [1] * 6)])
def test_large_layers_are_copied_in_pieces(driver, monkeypatch, share, of_experts):
    """The sum of the pieces is the layer, up to rounding the parts to bf16."""
    portable = Portable()
    w, batch = random_layer(**SIZES, bias=torch.bfloat16).weights, inputs(40, 0)
    size = sum(t.nbytes for t in w.tensors() if t is not None)
    monkeypatch.setattr(offload, "PORTABLE", portable)
    monkeypatch.setattr(upload, "PIECE", max(1, int(size * share)))
    y, want = offload.experts(*batch, w), cpu.experts(*batch, w)
    assert portable.experts_of_calls == of_experts
    assert relative_error(y, want) < THRESHOLDS["half"]


@needs_library
@pytest.mark.parametrize("share", [1, 1 / 4])
def test_the_gpu_takes_many_tokens_of_weights_in_files(driver, monkeypatch, tmp_path, share):
    """From FROM_FILES times as many tokens on; a missing file is an error of the call."""
    layer = random_layer(**SIZES, bias=torch.bfloat16)
    mapped, (file, _) = in_files(layer, tmp_path)
    T, size = offload.UPLOAD_WITHOUT_AMX * offload.FROM_FILES * SIZES["E"] // 2, sum(map(of_bytes, layer.parameters()))
    monkeypatch.setattr(offload, "PORTABLE", portable := Portable())
    monkeypatch.setattr(offload, "UPLOAD", offload.UPLOAD_WITHOUT_AMX)  # on every CPU
    monkeypatch.setattr(upload, "PIECE", int(size * share))
    few, many = inputs(T - 1, 0), inputs(T, 1)
    y, z = (offload.experts(*batch, mapped.weights) for batch in (few, many))
    driver.synchronize()
    assert torch.equal(y, cpu.experts(*few, layer.weights))
    assert portable.seen == [T] * (1 if share == 1 else 3)
    want = cpu.experts(*many, layer.weights)
    assert torch.equal(z, want) if share == 1 else relative_error(z, want) < THRESHOLDS["half"]
    truncate(file, 0)
    with pytest.raises(OSError, match=f"{file} became shorter"):
        offload.experts(*many, mapped.weights)


of_bytes = lambda t: t.nbytes


FROM_FILES = 0, 1, 5, 6  # codes and block scales of w13 and of w2 in `ExpertWeights.tensors`


@needs_library
@pytest.mark.parametrize("gated", [True, False])
def test_matrices_of_files_come_in_their_order(tmp_path, gated):
    """Matrices of any size, also larger than what a thread copies at a time; of some experts, and of none."""
    layer = random_layer(3, 1040, 1000, gate=Gate("silu") if gated else Gate("relu2", gated=False))
    mapped, _ = in_files(layer, tmp_path)
    sources, tensors = files.sources(mapped.weights), layer.weights.tensors()
    assert [i for i, source in enumerate(sources) if isinstance(source, files.InFiles)] == [*FROM_FILES]
    assert len(sources) == len(tensors)
    for source, want in ((sources[i], tensors[i]) for i in FROM_FILES):
        assert (tuple(source.shape), source.nbytes) == (tuple(want.shape), want.nbytes)
        for part in (slice(0, 3), slice(1, 3), slice(2, 2)):
            memory = torch.full((source[part].nbytes,), 77, dtype=torch.uint8)
            assert torch.equal(source[part].read(memory), want[part])


@needs_library
@pytest.mark.parametrize("staged", [1, 3000, 10_000, 64 << 20])  # bytes: an expert has 3072 of w13's codes
def test_a_pinned_buffer_is_filled_when_the_gpu_has_it_no_more(monkeypatch, tmp_path, staged):
    layer = random_layer(**SIZES)
    mapped, _ = in_files(layer, tmp_path)
    found = files.sources(mapped.weights)
    copies, allocated = [], []

    class Event:
        """An event as late as possible: work put on the stream before it runs only when somebody waits for it."""

        before = 0

        def record(self, stream):
            self.before = len(copies)

        def synchronize(self):
            for i in range(self.before):
                copies[i]()
                copies[i] = lambda: None

    class OnGPU:
        def __init__(self, tensor):
            self.tensor = tensor

        def __getitem__(self, experts):
            return OnGPU(self.tensor[experts])

        def copy_(self, t, non_blocking):
            assert non_blocking
            copies.append(lambda: self.tensor.copy_(t))

    monkeypatch.setattr(files, "STAGED", staged)
    monkeypatch.setattr(files, "_pinned", lambda size: allocated.append(size) or torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    staging, there = files.Staging(None), {}
    for i in FROM_FILES * 2:
        there[i] = torch.zeros(found[i].shape, dtype=torch.uint8)
        staging.send(found[i], OnGPU(there[i]))
    for copy_ in copies:
        copy_()
    assert all(torch.equal(t, layer.weights.tensors()[i]) for i, t in there.items())
    assert max(allocated) <= max(staged, found[0].nbytes // SIZES["E"])


def test_a_buffer_that_grows_is_free_when_the_work_with_it_is_over(monkeypatch):
    """torch gives its memory to others after what the copies' stream has then, whichever stream multiplied with it."""
    done = []
    stream = SimpleNamespace(wait_event=lambda event: done.append(event), wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    buffers = upload._Buffers(torch.device("cpu"))
    for size in (1, 1, 1000):
        found = buffers.fill({"t": torch.full((size,), 7)})
        assert (found.pop("t") == 7).all()
        weakref.finalize(buffers.memory[buffers.turn], done.append, f"{size} freed")
        buffers.emptied()
    assert done == [*buffers.over, buffers.over[0], "1 freed"]


def test_weights_move_to_pages_that_are_pinned_once_and_freed():
    small, large = torch.arange(100, dtype=torch.uint8), torch.arange((1 << 20) + 2).view(2, -1)
    assert pages.place(small) is small
    placed, done = pages.place(large), []
    assert torch.equal(placed, large) and placed.data_ptr() != large.data_ptr() and pages.place(placed) is placed
    do = lambda name, address, *_: done.append((name, address.value, copy_bytes(address.value)))
    copy_bytes = lambda address: ctypes.string_at(address + 8, 8)  # it is still there
    for _ in range(2):
        pages.pin(placed, do)
    pages.pin(large, do)  # not ours
    address = placed.data_ptr()
    del placed
    one = (1).to_bytes(8, "little")
    assert done == [("cuMemHostRegister_v2", address, one), ("cuMemHostUnregister", address, one)]
