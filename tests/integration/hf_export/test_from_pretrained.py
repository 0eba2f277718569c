"""A step of a training run is exported by `ckpt-restore --hf`, and `from_pretrained` loads it with equal weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import ckpt
from ckpt.tools.restore import command


def export(*arguments: object) -> None:
    assert command.main([*map(str, arguments)], standalone_mode=False) == 0


def train_and_save(model: torch.nn.Module, root: Path, steps: int = 2) -> None:
    """Train all parameters of a model for some steps, and save model and optimizer."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(steps):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn_like(p)
        optimizer.step()
        ckpt.save({"model": model, "optimizer": optimizer, "step": step}, root, step=step)


def assert_equal_weights(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    mine, others = found.state_dict(), expected.state_dict()
    assert list(mine) == list(others)
    for name, value in others.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name], value), name


def tied_names(model: torch.nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), set()).add(name)
    return {frozenset(n) for n in names.values() if len(n) > 1}


def make_gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_head=2, n_layer=2, n_positions=16, vocab_size=101))


def make_llama(tie: bool = False) -> Any:
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=101,
        tie_word_embeddings=tie,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def make_t5() -> Any:
    return hf.T5ForConditionalGeneration(hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=101))


def make_bert() -> Any:
    config = hf.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=101)
    return hf.BertForMaskedLM(config)


def make_bart() -> Any:
    config = hf.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=101, max_position_embeddings=16,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def make_mixtral() -> Any:
    config = hf.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=101,
        num_local_experts=4,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


MODELS = {
    "gpt2": make_gpt2, "llama": make_llama, "llama-tied": lambda: make_llama(True), "t5": make_t5, "bert": make_bert,
    "bart": make_bart, "mixtral": make_mixtral,
}  # fmt: skip


@pytest.mark.parametrize("size", ["5GB", "10KB"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_loads_with_equal_weights(make: Callable[[], Any], size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    train_and_save(model, tmp_path / "run")
    model.config.save_pretrained(tmp_path / "config")
    out = tmp_path / "out"
    export(tmp_path / "run", out, "--hf", "--strip", "model.", "--config", tmp_path / "config", "--max-shard-size", size)
    files = {p.name for p in out.iterdir()}
    assert ("model.safetensors" in files) == (size == "5GB")
    loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert_equal_weights(loaded, model)
    assert tied_names(loaded) == tied_names(model)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_the_files_are_those_of_save_pretrained(tmp_path: Path) -> None:
    """The names of the arrays, the index and the total size are equal; the shards may be cut at other places."""
    from safetensors import safe_open

    model = make_gpt2()
    train_and_save(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "theirs")
    export(tmp_path / "run", tmp_path / "one", "--hf", "--strip", "model.", "--config", tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as theirs, safe_open(
        tmp_path / "one" / "model.safetensors", "pt"
    ) as ours:  # fmt: skip
        assert set(ours.keys()) == set(theirs.keys())
        assert ours.metadata()["format"] == theirs.metadata()["format"] == "pt"
        total = sum(ours.get_tensor(name).nbytes for name in ours.keys())  # noqa: SIM118
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    assert (tmp_path / "one" / "generation_config.json").exists()
    export(tmp_path / "run", tmp_path / "many", "--hf", "--strip", "model.", "--max-shard-size", "20KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert set(index["weight_map"].values()) == {p.name for p in (tmp_path / "many").glob("*.safetensors")}


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    model = make_llama().to(torch.bfloat16)
    train_and_save(model, tmp_path / "run")
    model.config.save_pretrained(tmp_path / "config")
    export(tmp_path / "run", tmp_path / "out", "--hf", "--strip", "model.", "--config", tmp_path / "config" / "config.json")
    assert_equal_weights(hf.LlamaForCausalLM.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16), model)


def test_weights_that_were_tied_by_hand_are_stored_under_both_names(tmp_path: Path) -> None:
    """The configuration says that transformers does not tie them, so it would leave the second one at random values."""
    model = make_llama(tie=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    train_and_save(model, tmp_path / "run")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({**model.config.to_dict(), "tie_word_embeddings": False}))
    export(tmp_path / "run", tmp_path / "out", "--hf", "--strip", "model.", "--config", tmp_path / "config")
    assert_equal_weights(hf.LlamaForCausalLM.from_pretrained(tmp_path / "out"), model)


def test_a_renamed_model_loads(tmp_path: Path) -> None:
    """A model that another module wraps, as torch.compile and a training run's own classes do."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.net = inner

    model = make_gpt2()
    train_and_save(Wrapped(model), tmp_path / "run")
    model.config.save_pretrained(tmp_path / "config")
    out = tmp_path / "out"
    export(tmp_path / "run", out, "--hf", "--only", "model", "--rename", r"^model\.net\.=", "--config", tmp_path / "config")
    assert_equal_weights(hf.GPT2LMHeadModel.from_pretrained(out), model)


def test_the_tokenizer_is_copied(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    model = make_gpt2()
    train_and_save(model, tmp_path / "run")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    export(tmp_path / "run", tmp_path / "out", "--hf", "--strip", "model.", "--config", tmp_path / "base")
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "base").iterdir()}
