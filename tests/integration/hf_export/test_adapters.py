"""`ckpt-restore --hf` exports an adapter of peft, and `PeftModel.from_pretrained` loads it with equal weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools.restore import command


def export(*arguments: object) -> None:
    assert command.main([*map(str, arguments)], standalone_mode=False) == 0


def make_base() -> Any:
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=101
    )
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config)


ADAPTERS = {
    "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "dora": peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "embedding": peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "modules_to_save": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tokens": peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"]),
}


def train_and_save(model: Any, root: Path) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn_like(p)
        optimizer.step()
        ckpt.save({"model": model, "optimizer": optimizer, "step": step}, root, step=step)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_loads_with_equal_weights(kind: str, tmp_path: Path) -> None:
    model = peft.get_peft_model(make_base(), copy.deepcopy(ADAPTERS[kind]))
    train_and_save(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    out = tmp_path / "out"
    export(tmp_path / "run", out, "--hf", "--strip", "model.", "--config", tmp_path / "theirs")
    assert {p.name for p in out.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (out, tmp_path / "theirs"))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loaded = peft.PeftModel.from_pretrained(make_base(), out)
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_one_of_several_adapters_is_chosen(tmp_path: Path) -> None:
    model = peft.get_peft_model(make_base(), copy.deepcopy(ADAPTERS["lora"]), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(r=8, target_modules=["q_proj"]))
    model.set_adapter("first")
    train_and_save(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CkptError, match="adapters first, second: choose one with --adapter"):
        export(tmp_path / "run", tmp_path / "out", "--hf", "--strip", "model.")
    with pytest.raises(CkptError, match="no adapter of this name"):
        export(tmp_path / "run", tmp_path / "out", "--hf", "--strip", "model.", "--adapter", "third")
    for name in ("first", "second"):
        folder = tmp_path / "theirs" / name
        export(tmp_path / "run", tmp_path / name, "--hf", "--strip", "model.", "--adapter", name, "--config", folder)
        ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / name, folder))
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_an_adapter_with_trained_biases_is_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(make_base(), peft.LoraConfig(r=4, target_modules=["q_proj"], bias="all"))
    train_and_save(model, tmp_path / "run")
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    with pytest.raises(CkptError, match="save_pretrained"):
        export(tmp_path / "run", tmp_path / "out", "--hf", "--strip", "model.", "--config", tmp_path / "config")
    assert not (tmp_path / "out").exists()
