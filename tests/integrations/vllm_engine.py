"""vLLM for the tests. As one of several ranks: RANK=0 ... python -m tests.integrations.vllm_engine FORMS OUT"""

import json
import os
import sys

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

    return LLM(str(folder), **{"dtype": "float32", "max_model_len": 64, "enforce_eager": True, "seed": 0,
                               "kv_cache_memory_bytes": 1 << 26, "skip_tokenizer_init": True} | options)  # fmt: skip


def ask(llm, prompts=PROMPTS):
    """Greedy tokens [prompts][NEW], and log-probabilities of the prompts' tokens except the first."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        for output, prompt in zip(outputs, prompts, strict=True)
    ]
    return tokens, logprobs


def generate(folder, prompts=PROMPTS, again=None, **options):
    """What an engine answers; with `again`, after it has loaded the weights of that folder."""
    llm = engine(folder, **options)
    if again is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(again)})
    answers = ask(llm, prompts)
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


if __name__ == "__main__":
    os.environ |= SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    gather_on_cpus()
    for form, (folder, port, options) in json.loads(sys.argv[1]).items():
        os.environ["MASTER_PORT"] = str(port)  # ranks leave the last engine's at different times
        found = generate(folder, **options, distributed_executor_backend="external_launcher")
        with open(f"{sys.argv[2]}/{form}-{os.environ['RANK']}.json", "w") as file:
            json.dump(found, file)
