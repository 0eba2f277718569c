"""A torchtitan training of its Llama debug model on the CPU, which writes the loss of each step to a file and may kill itself.

torchrun torchtitan_training.py FOLDER LOSSES [--kill-at=N] [--manager=ckpt|dcp] [--tensors=FOLDER] [options of torchtitan]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from helpers.docs_pages import DOCS, blocks
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan looks for an accelerator
for name, stub in {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
}.items():
    setattr(torch.cpu, name, stub)

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

torch.set_num_threads(1)
dist_utils.set_pg_timeouts = lambda **_: None  # its barrier names a device, which gloo refuses
set_divide_factor = FSDPModule.set_gradient_divide_factor


def set_divide_factor_with_sums(module: FSDPModule, factor: float) -> None:
    set_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


FSDPModule.set_gradient_divide_factor = set_divide_factor_with_sums


def parsed() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("losses", type=Path)
    parser.add_argument("--manager", default="ckpt")
    parser.add_argument("--kill-at", type=int, default=-1, help="the step after which rank 0 kills itself")
    parser.add_argument("--tensors", type=Path, help="a folder for the parameters at the start and at the end, of each rank")
    return parser.parse_known_args()


options, more = parsed()


def data() -> Path:
    """Return the folder with a tokenizer and a small data set, made by rank 0 of the first run."""
    folder = options.folder.parent / "data"
    if folder.exists() or int(os.environ["RANK"]):
        return folder
    made = folder.with_name("data.new")
    (made / "text").mkdir(parents=True)
    words = {f"w{i}": i for i in range(200)} | {"[UNK]": 200, "<s>": 201, "</s>": 202}
    (made / "vocab.json").write_text(json.dumps(words))
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    lines = [json.dumps({"text": f"w{i * i * 7 % 200}"}) for i in range(4000)]
    (made / "text" / "data.jsonl").write_text("\n".join(lines))
    made.rename(folder)
    return folder


def checkpoint_of_the_page() -> Any:
    """Return the configuration that the lines of docs/howto/torchtitan.md make."""
    (diff,) = (block.text for block in blocks(DOCS / "howto" / "torchtitan.md") if block.kind == "diff")
    names: dict[str, Any] = {}
    statement, entry = (line[1:].strip() for line in diff.splitlines() if line.startswith("+"))
    exec(statement, names)
    return eval(f"dict({entry})", names)["checkpoint"]


def configuration() -> Any:
    """Return the configuration of a small training run, as a user's function would."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    del model.layers[2:]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention has no backward on the CPU
    config.activation_checkpoint = None
    config.metrics = MetricsProcessor.Config(log_freq=1, disable_color_printing=True)
    folder = data()
    config.hf_assets_path = str(folder)
    config.dataloader.dataset_path = str(folder / "text")
    config.dump_folder = str(options.folder)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, 12
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed = 7
    config.debug.enable_structured_logging = False
    if options.manager == "ckpt":
        config.checkpoint = checkpoint_of_the_page()
    else:
        config.checkpoint = CheckpointManager.Config(enable=True)
    config.checkpoint.interval, config.checkpoint.last_save_model_only = 2, False
    return config


class LoggedTrainer(Trainer):
    """Trainer that writes each loss with all its bits."""

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.step == options.kill_at and int(os.environ["RANK"]) == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    sys.modules["training_configs"] = SimpleNamespace(configuration=configuration)  # type: ignore[assignment]
    config = ConfigManager().parse_args(["--module", "training_configs", "--config", "configuration", *more])
    trainer = LoggedTrainer(config)
    log = trainer.metrics_processor.log

    def write_loss(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        with options.losses.with_name(f"{options.losses.name}.{os.environ['RANK']}").open("a") as file:
            file.write(f"{step} {float(loss).hex()}\n")
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = write_loss
    trainer.train()
    trainer.close()
    if options.tensors:
        torch.save(
            {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in trainer.model_parts[0].state_dict().items()},
            options.tensors / f"{os.environ['RANK']}.pt",
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
