"""vLLM for the tests. In a process of its own: python -m tests.integrations.vllm_engine FOLDER OPTIONS OUT"""

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


def generate(folder, prompts=PROMPTS, **options):
    """Of vLLM: (greedy tokens [prompts][NEW], log-probabilities of the prompts' tokens but the first)."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), **{"dtype": "float32", "max_model_len": 64, "enforce_eager": True, "seed": 0,
                              "skip_tokenizer_init": True} | options)  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        for output, prompt in zip(outputs, prompts, strict=True)
    ]
    llm.llm_engine.engine_core.shutdown()
    return tokens, logprobs


if __name__ == "__main__":
    os.environ |= SETTINGS
    with open(sys.argv[3], "w") as file:
        json.dump(generate(sys.argv[1], **json.loads(sys.argv[2])), file)
