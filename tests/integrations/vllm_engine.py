"""vLLM for the tests: engines in this process, and on two ranks, processes that serve all tests."""

import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.common import free_port

ROOT = Path(__file__).parents[2]

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",  # threads that wait by spinning slow each other down on few cores
    "HF_HUB_OFFLINE": "1",
}
PROMPTS = [[(7 * i * i + 3 * j + j * j * i) % 90 + 3 for j in range(24)] for i in range(8)]
NEW = 12


def engine(folder, **options):
    """A small engine in this process."""
    from vllm import LLM
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # else another process imports vLLM for each class of models
    gc.freeze()  # vLLM collects garbage five times while it starts; it undoes this when it ends
    return LLM(str(folder), **{"dtype": "float32", "max_model_len": 64, "enforce_eager": True, "seed": 0,
                               "kv_cache_memory_bytes": 1 << 26, "skip_tokenizer_init": True} | options)  # fmt: skip


def lora(folder, number=None):
    """vLLM's request of the adapter in `folder`; adapters have numbers of their own."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(Path(folder).name, number or numbers.setdefault(str(folder), len(numbers) + 1), str(folder))


numbers = {}


def ask(llm, prompts=PROMPTS, adapters=None):
    """Greedy tokens [prompts][NEW], and log-probabilities of the prompts' tokens except the first. adapters: the folder
    of each prompt's, or None."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    chosen = None if adapters is None else [None if folder is None else lora(folder) for folder in adapters]
    given = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(given, sampling, use_tqdm=False, lora_request=chosen)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        for output, prompt in zip(outputs, prompts, strict=True)
    ]
    return tokens, logprobs


def generate(folder, prompts=PROMPTS, again=None, adapters=None, **options):
    """What an engine answers; with `again`, after it has loaded the weights of that folder. adapters: as of `ask`."""
    llm = engine(folder, **options)
    if again is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(again)})
    answers = ask(llm, prompts, adapters)
    llm.llm_engine.engine_core.shutdown()
    return answers


def gather_on_cpus():
    """Give vLLM's communicator for CPUs (0.32) what data parallelism of MoE layers needs and it lacks."""
    import torch
    from torch import distributed
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, tensors, dim=0, sizes=None):
        assert dim == 0
        parts = [None] * self.world_size
        distributed.all_gather_object(parts, tensors, self.cpu_group)
        if isinstance(tensors, torch.Tensor):
            return torch.cat(parts)
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    def reduce_scatterv(self, tensor, dim=-1, sizes=None):
        assert dim == 0
        parts = [None] * self.world_size
        distributed.all_gather_object(parts, tensor, self.cpu_group)
        return sum(parts).split(sizes or len(tensor) // self.world_size)[self.rank_in_group].contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


class Ranks:
    """Two processes that run engines together. Importing vLLM takes longer than most of their answers."""

    def __init__(self):
        for left in Path("/dev/shm").glob("-*-cpushm_*"):  # left by killed ranks: vLLM uses the same names again
            left.unlink()
        env = os.environ | SETTINGS | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        self.log = tempfile.TemporaryFile("w+")
        self.processes = [
            subprocess.Popen([sys.executable, "-m", "tests.integrations.vllm_engine"], cwd=ROOT, text=True,
                             env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                             stdin=subprocess.PIPE, stdout=self.log, stderr=subprocess.STDOUT)
            for rank in range(2)
        ]  # fmt: skip
        atexit.register(self.end)

    def answers(self, forms, out, seconds=400):
        """form -> what each rank answers, one form after another. forms: form -> (folder, options); out: a folder."""
        given = {form: (str(path), free_port(), options) for form, (path, options) in forms.items()}
        for process in self.processes:
            print(json.dumps([given, str(out)]), file=process.stdin, flush=True)
        files = {form: [Path(out) / f"{form}-{rank}.json" for rank in range(2)] for form in forms}
        for _ in range(10 * seconds):
            if all(file.exists() for pair in files.values() for file in pair):
                return {form: [json.loads(file.read_text()) for file in pair] for form, pair in files.items()}
            if self.ended:
                break
            time.sleep(0.1)
        self.end()
        self.log.seek(0)
        raise AssertionError(self.log.read()[-6000:])

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def ended(self):
        return any(process.poll() is not None for process in self.processes)


ranks = []  # those that run, if any


def on_two_ranks(forms, out):
    """`Ranks.answers`, of new processes where the last ones have failed."""
    if not ranks or ranks[-1].ended:
        ranks.append(Ranks())
    return ranks[-1].answers(forms, out)


if __name__ == "__main__":
    os.environ |= SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    gather_on_cpus()
    for line in sys.stdin:
        given, out = json.loads(line)
        for form, (folder, port, options) in given.items():
            os.environ["MASTER_PORT"] = str(port)  # ranks leave the last engine's at different times
            found = generate(folder, **options, distributed_executor_backend="external_launcher")
            file = Path(out) / f"{form}-{os.environ['RANK']}"
            file.write_text(json.dumps(found))
            file.rename(file.with_suffix(".json"))  # seen when it is whole
