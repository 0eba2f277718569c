"""vLLM loads a step by `--load-format ckpt`, and serves the same tokens as from an export of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers.flipped_bits import flip_bit_of_leaf
from helpers.processes import free_port, python_path

import ckpt

HERE = Path(__file__).parent


def make_model(kind: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    if kind == "gpt2":
        config: Any = hf.GPT2Config(n_embd=64, n_head=2, n_layer=2, n_positions=64, vocab_size=128)
        return hf.GPT2LMHeadModel(config)
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=128,
        max_position_embeddings=64, tie_word_embeddings=kind == "tied",
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def serve(folder: Path, load_format: str, options: dict[str, Any], more: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    arguments = [str(folder), load_format, json.dumps(options), json.dumps(more or [])]
    env = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, HERE / "serve.py", *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve_by_two(folder: Path, load_format: str, options: dict[str, Any], folders: list[Path]) -> list[dict[str, Any]]:
    """Return what two tensor-parallel ranks print, each of which runs in a folder of its own."""
    port = str(free_port())
    command = [sys.executable, str(HERE / "serve.py"), str(folder), load_format, json.dumps(options)]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
            env=os.environ | {
                "PYTHONPATH": python_path(),
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            },
        )
        for rank, cwd in enumerate(folders)
    ]  # fmt: skip
    found = []
    for rank in ranks:
        output, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0, output[-6000:]
        found.append(json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{"))))
    return found


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_the_weights_and_the_tokens_are_those_of_an_export(tmp_path: Path, kind: str) -> None:
    model = make_model(kind, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model.save_pretrained(tmp_path / "exported")
    model.config.save_pretrained(tmp_path / "config")  # without weights
    url = str(tmp_path / "run")
    ckpt.save({"model": make_model(kind, 2), "optimizer": optimizer}, url, 1)
    ckpt.save({"model": model, "optimizer": optimizer}, url, 2)

    more: list[dict[str, Any]] = []
    if kind == "llama":
        state = dict(model.state_dict())
        ckpt.save({n: t for n, t in state.items() if "1.self_attn.o_proj" not in n}, tmp_path / "missing")
        ckpt.save({n: t for n, t in state.items() if "0.mlp.up_proj" not in n}, tmp_path / "part")
        ckpt.save({n: t[:5] if n == "model.norm.weight" else t for n, t in state.items()}, tmp_path / "shape")
        ckpt.save({**state, "model.layers.0.mlp.other.weight": torch.ones(3)}, tmp_path / "key")
        flip_bit_of_leaf(ckpt.save(state, tmp_path / "damaged", codec="none"), "model.layers.1.self_attn.o_proj.weight")
        more = [
            {"url": str(tmp_path / name)} for name in ("missing", "part", "shape", "key", "damaged", "nothing")
        ] + [{"url": url}, {"url": url, "prefix": "model", "steps": 1}, {"url": url, "prefix": "model", "step": 1}]  # fmt: skip
        more.append({"url": str(tmp_path / "missing"), "strict": False})

    found = serve(tmp_path / "config", "ckpt", {"url": url, "prefix": "model"}, more)
    expected = serve(tmp_path / "exported", "safetensors", {})
    assert found["tokens"] == expected["tokens"]
    assert found["logprobs"] == expected["logprobs"]  # bit for bit
    assert found["digest"] == expected["digest"]

    if kind == "llama":
        missing, part, shape, key, damaged, nothing, parts, option, older, lenient = found["answers"]
        assert missing == (
            "LeafNotFound: the step lacks 1 weights of the model, such as model.layers.1.self_attn.o_proj.weight: check prefix "
            "and rename, or set strict to false"
        )
        assert "such as model.layers.0.mlp.up_proj.weight" in part
        assert len(lenient) == 64
        assert shape.startswith(("AssertionError", "ValueError", "RuntimeError"))
        assert "layers.0.mlp.other" in key
        assert damaged.startswith("IntegrityError: leaf model.")
        assert nothing.startswith("StepNotFound: nothing has been saved to")
        assert parts.startswith("InvalidArgument: step 2 of")
        assert "has the parts model: name that of the model" in parts
        assert (
            option
            == "InvalidArgument: model_loader_extra_config: ckpt has no option steps; use url, step, prefix, rename, strict"
        )
        assert len(older) == 64
        assert older != found["digest"]


def test_two_tensor_parallel_ranks_load_their_parts_of_one_step(tmp_path: Path) -> None:
    model = make_model("llama", 1)
    model.save_pretrained(tmp_path / "exported")
    model.config.save_pretrained(tmp_path / "config")
    folders = [tmp_path / "rank0", tmp_path / "rank1"]
    for folder in folders:
        ckpt.save({"model": model}, folder / "run", 1)
    ckpt.save({"model": make_model("llama", 2)}, folders[1] / "run", 2)  # as if the second rank looked later

    found = serve_by_two(tmp_path / "config", "ckpt", {"url": "run", "prefix": "model"}, folders)
    expected = serve_by_two(tmp_path / "exported", "safetensors", {}, folders)
    assert [rank["digest"] for rank in found] == [rank["digest"] for rank in expected]
    assert found[0]["digest"] != found[1]["digest"]
    assert found[0]["tokens"] == expected[0]["tokens"]


def test_the_command_line_takes_the_format() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = '{"url": "/data/run", "prefix": "model"}'
    given = parser.parse_args(["--model", "x", "--load-format", "ckpt", "--model-loader-extra-config", options])
    assert given.load_format == "ckpt"
    assert given.model_loader_extra_config == {"url": "/data/run", "prefix": "model"}
