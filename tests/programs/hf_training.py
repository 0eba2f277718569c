"""A training run by a subclass of Trainer, for tests/integration/transformers. It may kill itself.

usage: hf_training.py FOLDER NAME OPTIONS    (OPTIONS is JSON)

Each rank appends the loss of each micro-batch to FOLDER/NAME-RANK.jsonl, as [update, loss], and each logged loss to
FOLDER/NAME-RANK.logs.jsonl. With the option fsdp, each save and the start of the training append a digest of the model to
FOLDER/NAME-RANK.digests.jsonl.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ckpt
from ckpt.adapters.transformers import CheckpointedTrainer, CkptTrainer
from programs import fsdp2_on_cpu

FOLDER, NAME = Path(sys.argv[1]), sys.argv[2]
OPTIONS: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
RANK = int(os.environ.get("RANK", "0"))
WORDS = 31


class Tokens(torch.utils.data.Dataset):
    """Sequences of which each access changes a random word, as an augmentation does."""

    def __init__(self, count: int) -> None:
        self.rows = np.random.RandomState(5).randint(0, WORDS, (count, 8))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index].copy()
        if OPTIONS.get("random_data", True):
            row[random.randrange(8)] = np.random.randint(WORDS)
        return {"input_ids": row.tolist()}


class Stream(torch.utils.data.IterableDataset):
    """The same without a length. The option `stream` may name an order: see `_order`."""

    def __init__(self, count: int) -> None:
        self.rows = Tokens(count)
        self.random = np.random.default_rng(5)

    def __iter__(self) -> Any:
        buffer: list[int] = []
        for index in self._order():
            buffer.append(index)
            if OPTIONS["stream"] != "buffered" or len(buffer) == 5:
                yield self.rows[buffer.pop(int(torch.randint(len(buffer), ())) if len(buffer) > 1 else 0)]
        yield from (self.rows[index] for index in buffer)

    def _order(self) -> list[int]:
        if OPTIONS["stream"] == "permuted":
            return torch.randperm(len(self.rows)).tolist()
        if OPTIONS["stream"] == "own":
            return self.random.permutation(len(self.rows)).tolist()
        return list(range(len(self.rows)))


def shuffled_stream() -> Any:
    """Return a stream of the package datasets, which has another order in each pass."""
    import datasets

    rows = datasets.Dataset.from_list([Tokens(22)[i] for i in range(22)])
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5)


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    labels = ids.clone()
    if OPTIONS.get("random_data", True):
        ids = torch.where(torch.rand(ids.shape) < 0.15, 0, ids)
    return {"input_ids": ids, "labels": labels}


class Killer(TrainerCallback):
    """Kills the process in the middle of an update, once the last save is committed."""

    saved = 0

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = state.global_step
        self.write_digest(state, **_)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.write_digest(state, **_)

    def write_digest(self, state: Any, model: Any, optimizer: Any, **_: Any) -> None:
        if OPTIONS.get("fsdp") is not None:
            write("digests.jsonl", [state.global_step, fsdp2_on_cpu.digest(model, [optimizer])])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == OPTIONS.get("kill_at", -1):
            while newest_step() < self.saved:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == OPTIONS.get("stop_at"):
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            write("logs.jsonl", [state.global_step, float(logs["loss"]).hex()])


def newest_step() -> int:
    try:
        return max(ckpt.open(OPTIONS.get("url", FOLDER / "out/ckpt")).steps(), default=0)
    except ckpt.StepNotFound:
        return 0


def write(suffix: str, row: list[Any]) -> None:
    with open(FOLDER / f"{NAME}-{RANK}.{suffix}", "a") as file:
        file.write(json.dumps(row) + "\n")


class Recorder:
    """Writes the loss of each micro-batch; a base class of a Trainer."""

    out_of_memory_at = OPTIONS.get("out_of_memory_at", {}).get(NAME)
    """The update for which the memory does not suffice, once."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == Recorder.out_of_memory_at:  # type: ignore[attr-defined]
            Recorder.out_of_memory_at = None
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        write("jsonl", [self.state.global_step, float(loss).hex()])  # type: ignore[attr-defined]
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """With the option best_at, the loss is largest at this step, whatever the versions of the libraries are."""
        metrics = super().evaluate(*args, **kwargs)  # type: ignore[misc]
        if "best_at" in OPTIONS:
            metrics["eval_loss"] = -abs(self.state.global_step - OPTIONS["best_at"])  # type: ignore[attr-defined]
        return metrics


def make_model() -> Any:
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    if OPTIONS.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


def make_arguments(kind: Any = TrainingArguments, **more: Any) -> Any:
    values = {
        "output_dir": str(FOLDER / "out"), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 3, "learning_rate": 0.01, "lr_scheduler_type": "cosine", "save_steps": 2, "logging_steps": 3,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 11,
        "remove_unused_columns": False,
    }  # fmt: skip
    return kind(**(values | more | OPTIONS.get("args", {})))


def make_trainer() -> Any:
    kind: Any = Trainer if OPTIONS.get("plain") else CkptTrainer
    data: Any = (Stream if OPTIONS.get("stream") else Tokens)(OPTIONS.get("samples", 22))
    if OPTIONS.get("shuffled_stream"):
        data = shuffled_stream()
    more: dict[str, Any] = {}
    if OPTIONS.get("evaluate"):
        more["eval_dataset"] = Tokens(6)
    if OPTIONS.get("url"):
        more["ckpt"] = OPTIONS["url"]
    if OPTIONS.get("dpo"):
        return make_dpo_trainer()
    if OPTIONS.get("grpo"):
        return make_grpo_trainer()
    if OPTIONS.get("sft"):
        return make_sft_trainer(more)

    class Recording(Recorder, kind):  # type: ignore[misc]
        pass

    callbacks: list[Any] = [Killer()]
    if OPTIONS.get("patience"):
        callbacks.append(EarlyStoppingCallback(OPTIONS["patience"], early_stopping_threshold=100.0))  # which nothing reaches
    return Recording(make_model(), make_arguments(), data_collator=collate, train_dataset=data, callbacks=callbacks, **more)


def make_sft_trainer(more: dict[str, Any]) -> Any:
    import datasets
    from trl import SFTConfig, SFTTrainer

    class Recording(Recorder, CheckpointedTrainer, SFTTrainer):  # type: ignore[misc]
        pass

    rows = datasets.Dataset.from_list([Tokens(22)[i] for i in range(22)])
    args = make_arguments(SFTConfig, max_length=8, remove_unused_columns=True)
    return Recording(make_model(), args, train_dataset=rows, processing_class=make_tokenizer(), callbacks=[Killer()], **more)


def make_dpo_trainer() -> Any:
    """Return a trainer whose reference model follows the model every two updates."""
    import datasets
    from trl import DPOConfig, DPOTrainer

    class Recording(Recorder, CheckpointedTrainer, DPOTrainer):  # type: ignore[misc]
        pass

    parts = {"prompt": slice(3), "chosen": slice(3, 5), "rejected": slice(5, 8)}
    words = {name: Tokens(22).rows[:, part].tolist() for name, part in parts.items()}
    rows = datasets.Dataset.from_dict({name: [" ".join(map(str, row)) for row in each] for name, each in words.items()})
    args = make_arguments(
        DPOConfig, max_length=8, remove_unused_columns=True, sync_ref_model=True, ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.6,
    )  # fmt: skip
    model, reference = make_model(), make_model()
    return Recording(model, reference, args=args, train_dataset=rows, processing_class=make_tokenizer(), callbacks=[Killer()])


def make_grpo_trainer() -> Any:
    """Return a trainer that uses the samples of one generation for two updates."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    class Recording(Recorder, CheckpointedTrainer, GRPOTrainer):  # type: ignore[misc]
        pass

    def different_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    rows = datasets.Dataset.from_list([{"prompt": f"{i} {i + 1} {i + 2}"} for i in range(12)])
    args = make_arguments(
        GRPOConfig, bf16=False, num_generations=2, steps_per_generation=4, max_completion_length=4, remove_unused_columns=True
    )
    return Recording(
        make_model(), reward_funcs=different_words, args=args, train_dataset=rows, processing_class=make_tokenizer(),
        callbacks=[Killer()],
    )  # fmt: skip


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0")


def main() -> None:
    if "deepspeed" in OPTIONS.get("args", {}):
        from helpers.deepspeed_cpu import use_gloo

        use_gloo()
    fsdp2_on_cpu.choose_fsdp()
    trainer = make_trainer()
    done = trainer.train(resume_from_checkpoint=OPTIONS.get("resume"))
    if OPTIONS.get("fsdp"):
        fsdp2_on_cpu.require_fsdp2(trainer.accelerator, trainer.model_wrapped)
    weights = sum(p.detach().double().sum() for p in trainer.model.parameters() if p.requires_grad)
    write("end.jsonl", [trainer.state.global_step, float(weights).hex(), trainer.state.best_global_step,
                        trainer.state.best_model_checkpoint, done.training_loss])  # fmt: skip
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
