"""Loads a model with SGLang's ModelRunner on the CPU, and prints what it has and what it computes.

    python load.py FOLDER LOAD_FORMAT OPTIONS [ACTIONS]

FOLDER has a config.json. OPTIONS is the JSON of `model_loader_extra_config`. ACTIONS is a JSON list of what is done then:
["load", OPTIONS] makes a new model by a new loader, ["update", PATH] is `update_weights_from_disk`, ["move", FROM, TO] renames
a folder. RANK and WORLD_SIZE make it one of several tensor-parallel ranks. The last line of the output is a JSON object.

SGLang finds no accelerator here, and its kernels for CPUs (sgl_kernel) have no package. Its models, loaders and runners work
nevertheless, after the two calls at the top.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cpu_sglang import declare_operators, use_native_rotary
from helpers.model_digest import digest

declare_operators()
use_native_rotary()

from sglang.benchmark import one_batch  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import bootstrap  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.model_loader import get_model_loader  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PORT = int(os.environ.get("MASTER_PORT", "29771"))


def make_runner(folder: str, load_format: str, options: str) -> ModelRunner:
    args = ServerArgs(
        model_path=folder, load_format=load_format, model_loader_extra_config=options, tp_size=WORLD, device="cpu",
        dtype="float32", attention_backend="torch_native", skip_tokenizer_init=True, mem_fraction_static=0.1,
    )  # fmt: skip
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=RANK, gpu_id=RANK))
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=PORT)
    bootstrap.init_layer_runtime(model_config=config)
    return ModelRunner(model_config=config, mem_fraction_static=0.1, gpu_id=RANK, nccl_port=PORT, server_args=args)


def logits(runner: ModelRunner) -> list[float]:
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, 5, [[3, 1, 4, 1, 5]])
    found: list[float] = one_batch.extend(requests, runner)[1][0].tolist()
    return found


def answer(runner: ModelRunner, load_format: str, action: str, *arguments: Any) -> object:
    try:
        if action == "move":
            os.rename(*arguments)
            return None
        if action == "update":
            done, message = runner.weight_updater.update_weights_from_disk(*arguments, load_format)
            return {"done": done, "message": message, "digest": digest(runner.model)}
        loader = get_model_loader(
            LoadConfig(load_format=load_format, model_loader_extra_config=arguments[0]), runner.model_config
        )
        return digest(loader.load_model(model_config=runner.model_config, device_config=DeviceConfig("cpu", 0)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    folder, load_format, options = sys.argv[1:4]
    load_plugins()
    try:
        runner = make_runner(folder, load_format, options)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    found: dict[str, object] = {"loader": type(runner.loader).__name__, "digest": digest(runner.model)}
    found["shapes"] = {name: list(parameter.shape) for name, parameter in runner.model.named_parameters()}
    if WORLD == 1:
        found["logits"] = logits(runner)
    found["answers"] = [answer(runner, load_format, *action) for action in json.loads(sys.argv[4])] if len(sys.argv) > 4 else []
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
