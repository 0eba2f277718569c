"""Loads a model with vLLM, prints tokens that it generates, and what its loader says to further steps.

    python serve.py FOLDER LOAD_FORMAT OPTIONS [MORE_OPTIONS]

FOLDER has a config.json. OPTIONS is the JSON of `model_loader_extra_config`. MORE_OPTIONS is a JSON list of further ones, each
of which is loaded into a new model. WORLD_SIZE, as torchrun sets it, makes this one of several tensor-parallel ranks. The last
line of the output is a JSON object.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip

import torch
from helpers.model_digest import digest
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    folder, load_format, options = sys.argv[1:4]
    llm = LLM(
        folder, load_format=load_format, model_loader_extra_config=json.loads(options), skip_tokenizer_init=True,
        dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2, seed=0, tensor_parallel_size=RANKS,
        distributed_executor_backend="external_launcher" if RANKS > 1 else None,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=5)
    (output,) = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], greedy, use_tqdm=False)
    probabilities = [
        sorted((token, entry.logprob.hex()) for token, entry in each.items()) for each in output.outputs[0].logprobs
    ]
    found = {"tokens": list(output.outputs[0].token_ids), "logprobs": probabilities}
    config = llm.llm_engine.vllm_config

    def work(model: torch.nn.Module) -> None:
        found["digest"] = digest(model)
        found["answers"] = [answer(more) for more in json.loads(sys.argv[4])] if len(sys.argv) > 4 else []

    def answer(more: dict[str, object]) -> str:
        try:
            loader = get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=more))
            loader.download_model(config.model_config)
            config.compilation_config.static_forward_context.clear()  # else the names of the layers exist already
            with set_current_vllm_config(config):
                return digest(loader.load_model(vllm_config=config, model_config=config.model_config))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    llm.apply_model(work)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
