"""`from_pretrained` takes the weights of a step by its argument `state_dict`, without an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import ckpt
from ckpt.adapters.weights import iterate_weights


def make_model(kind: str) -> Any:
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_head=2, n_layer=2, n_positions=16, vocab_size=101))
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=101,
        tie_word_embeddings=kind == "tied",
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied"])
def test_the_weights_are_those_of_the_step(tmp_path: Path, kind: str) -> None:
    model = make_model(kind)
    ckpt.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, tmp_path, 3)
    state = dict(iterate_weights(tmp_path, prefix="model"))
    found, info = type(model).from_pretrained(None, config=model.config, state_dict=state, output_loading_info=True)
    assert type(found) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    mine, others = found.state_dict(), model.state_dict()
    assert list(mine) == list(others)
    for name, tensor in others.items():
        assert mine[name].equal(tensor), name
    tokens = torch.arange(8)[None]
    assert found.eval()(tokens).logits.equal(model.eval()(tokens).logits)


def test_a_missing_weight_is_in_the_report(tmp_path: Path) -> None:
    model = make_model("llama")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    ckpt.save(state, tmp_path)
    _, info = hf.LlamaForCausalLM.from_pretrained(
        None, config=model.config, state_dict=dict(iterate_weights(tmp_path)), output_loading_info=True
    )
    assert list(info["missing_keys"]) == ["model.layers.1.mlp.up_proj.weight"]
