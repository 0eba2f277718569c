"""Components of the torchtune configurations of these tests, and the files of a tiny Llama 2 model, its tokenizer and data."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any


class Losses:
    """A metric logger that writes each loss with all its bits, and kills the process after a step."""

    def __init__(self, path: str, kill_at: int = -1, **options: Any) -> None:
        self._path, self._kill_at = f"{path}.{os.environ.get('RANK', '0')}", kill_at

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        with open(self._path, "a") as file:
            file.write(f"{step} {float(payload['loss']).hex()} {float(payload['lr']).hex()}\n")
        if step == self._kill_at and int(os.environ.get("RANK", "0")) == 0:
            self._wait_for_a_step()
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_a_step(self) -> None:
        """Wait until the output folder has a step, so that the restart does not begin anew on a slow machine."""
        folder, deadline = Path(self._path.partition(".losses")[0]), time.monotonic() + 600
        while not any(folder.rglob("commit.json")) and not any(folder.rglob("recipe_state.pt")):
            assert time.monotonic() < deadline, f"no step in {folder}"
            time.sleep(0.02)

    def close(self) -> None:
        pass


SIZE = {"vocab_size": 96, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64}


def make_files(folder: Path) -> None:
    """Write a tokenizer, a text data set, and a model in the format of Hugging Face."""
    import sentencepiece
    import torch
    from safetensors.torch import save_file
    from torchtune.models.convert_weights import tune_to_hf
    from torchtune.models.llama2 import llama2

    (folder / "base").mkdir(parents=True)
    draw = random.Random(1)
    texts = [" ".join(draw.choice(["red", "green", "blue", "one", "two", "three"]) for _ in range(12)) for _ in range(42)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "text").write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "base" / "tokenizer"), vocab_size=40, pad_id=3,
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    torch.manual_seed(5)
    state = tune_to_hf(llama2(**SIZE).state_dict(), num_heads=2, num_kv_heads=2, dim=32)
    save_file(state, folder / "base" / "model.safetensors", metadata={"format": "pt"})
    config = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32}
    (folder / "base" / "config.json").write_text(json.dumps(config))


CONFIG = """\
output_dir: out
tokenizer:
  _component_: torchtune.models.llama2.llama2_tokenizer
  path: base/tokenizer.model
  max_seq_len: 32
dataset:
  _component_: torchtune.datasets.text_completion_dataset
  source: json
  data_files: data.jsonl
  split: train
  packed: False
seed: 7
shuffle: True
model:
  _component_: torchtune.models.llama2.MODEL
  attn_dropout: 0.2
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: base
  checkpoint_files: [model.safetensors]
  output_dir: ${output_dir}
  model_type: LLAMA2
resume_from_checkpoint: False
batch_size: 2
epochs: 3
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-3
optimizer_in_bwd: False
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 3
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
max_steps_per_epoch: null
gradient_accumulation_steps: 2
clip_grad_norm: 1.0
compile: False
device: cpu
dtype: fp32
enable_activation_checkpointing: False
enable_activation_offloading: False
metric_logger:
  _component_: tune_parts.Losses
  path: losses
log_every_n_steps: 1
"""

LORA = """
  lora_attn_modules: [q_proj, v_proj]
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 4
  lora_alpha: 8
  lora_dropout: 0.1
"""


def configuration(lora: bool) -> str:
    """Return the text of a configuration that uses torchtune's own checkpointer."""
    size = "".join(f"\n  {name}: {value}" for name, value in SIZE.items())
    model = "  attn_dropout: 0.2\n"
    more = model.rstrip("\n") + size + (LORA if lora else "\n")
    return CONFIG.replace("MODEL", "lora_llama2" if lora else "llama2").replace(model, more)
