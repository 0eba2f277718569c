"""SGLang loads a step by `--load-format ckpt`, and computes what it computes from an export of transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from helpers.flipped_bits import flip_bit_of_leaf
from helpers.processes import free_port, python_path

import ckpt

HERE = Path(__file__).parent
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def make_model(seed: int, tied: bool = False, vocabulary: int = 128) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=vocabulary, max_position_embeddings=64, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def start(
    folder: Path, load_format: str, options: dict[str, Any], actions: list[list[Any]] | None = None, **environment: Any
) -> subprocess.Popen[str]:
    arguments = [str(folder), load_format, json.dumps(options), json.dumps(actions or [])]
    cwd = environment.pop("cwd", None)
    env = {
        **os.environ,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": python_path(),
        **environment,
    }
    env.pop("CKPT_DIR", None)
    return subprocess.Popen(
        [sys.executable, HERE / "load.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=cwd,
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=300)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0, out[-3000:] + errors[-6000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def load(folder: Path, load_format: str, options: dict[str, Any], actions: list[list[Any]] | None = None) -> dict[str, Any]:
    return result(start(folder, load_format, options, actions, MASTER_PORT=str(free_port())))


def load_by_two(folder: Path, load_format: str, options: dict[str, Any], folders: list[Path | None]) -> list[dict[str, Any]]:
    port = str(free_port())
    ranks = [
        start(folder, load_format, options, RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port, cwd=cwd)
        for rank, cwd in enumerate(folders)
    ]
    return [result(rank) for rank in ranks]


def export(model: Any, folder: Path) -> tuple[Path, Path]:
    """Return a folder with the weights and one without them."""
    model.save_pretrained(folder / "exported")
    model.config.save_pretrained(folder / "config")
    return folder / "exported", folder / "config"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What SGLang has loaded from a step and from an export of the same model."""

    model: Any
    from_step: dict[str, Any]
    from_export: dict[str, Any]
    answers: dict[str, str]
    """The digest of the weights that it loaded with other options, or the error."""


@pytest.fixture(name="loaded", scope="module")
def load_step_and_export(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder, model = tmp_path_factory.mktemp("loaded"), make_model(1)
    exported, config = export(model, folder)
    url, state = str(folder / "run"), dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt.save({"model": make_model(2), "optimizer": optimizer}, url, 1)
    ckpt.save({"model": model, "optimizer": optimizer}, url, 2)

    cases = wrong_options(folder) | steps_that_do_not_fit(folder, state)
    cases |= accepted_options(folder, state)
    found = load(config, "ckpt", {"url": url, "prefix": "model"}, [["load", options] for options in cases.values()])
    expected = load(exported, "safetensors", {})
    return Loaded(model, found, expected, dict(zip(cases, found["answers"], strict=True)))


def save_step(state: dict[str, Any], url: Path) -> dict[str, Any]:
    """Save a step, and return the options that load it."""
    ckpt.save(state, url)
    return {"url": str(url)}


def wrong_options(folder: Path) -> dict[str, dict[str, Any]]:
    """Return options that fail with steps 1 and 2 of the run."""
    url = str(folder / "run")
    return {
        "unknown option": {"url": url, "prefix": "model", "steps": 1},
        "type of option": {"url": url, "prefix": "model", "step": "1"},
        "nothing saved": {"url": str(folder / "nothing")},
        "no such step": {"url": url, "prefix": "model", "step": 9},
        "no url": {"prefix": "model"},
        "no prefix": {"url": url},
        "wrong prefix": {"url": url, "prefix": "modle"},
        "prefix within the model": {"url": url, "prefix": "model.model"},
    }


def steps_that_do_not_fit(folder: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Save steps that do not fit the model, and return the options that would load them."""
    flip_bit_of_leaf(ckpt.save(state, folder / "damaged", codec="none"), O_PROJ)
    norm = "model.norm.weight"
    return {
        "missing": save_step({n: t for n, t in state.items() if n != O_PROJ}, folder / "missing"),
        "missing part": save_step({n: t for n, t in state.items() if "0.mlp.up_proj" not in n}, folder / "part"),
        "shape": save_step({**state, norm: state[norm][:5]}, folder / "shape"),
        "type": save_step({**state, norm: np.array(["a", "b"])}, folder / "type"),
        "damaged": {"url": str(folder / "damaged")},
    }


def accepted_options(folder: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Save more steps, and return options that load a step. `folder` has the steps that do not fit."""
    half = {n: t.to(torch.bfloat16) for n, t in state.items()}
    return {
        "older": {"url": str(folder / "run"), "prefix": "model", "step": 1},
        "lenient": {"url": str(folder / "missing"), "strict": False},
        "half": save_step(half, folder / "half"),
        "rounded": save_step({n: t.float() for n, t in half.items()}, folder / "rounded"),
        "renamed": save_step({f"net.{n}": t for n, t in state.items()}, folder / "other") | {"rename": {"^net\\.": ""}},
    }


def test_the_weights_and_the_logits_are_those_of_an_export(loaded: Loaded) -> None:
    found, expected = loaded.from_step, loaded.from_export
    assert (found["loader"], expected["loader"]) == ("SglangStepLoader", "DefaultModelLoader")
    assert found["digest"] == expected["digest"]
    assert found["logits"] == expected["logits"]  # bit for bit
    with torch.no_grad():
        of_transformers = loaded.model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1]
    torch.testing.assert_close(torch.tensor(found["logits"]), of_transformers, rtol=1e-4, atol=1e-5)


def test_wrong_options_are_refused(loaded: Loaded) -> None:
    answers = loaded.answers
    assert answers["unknown option"] == (
        "InvalidArgument: model_loader_extra_config: ckpt has no option steps; use url, step, prefix, rename, strict"
    )
    assert answers["type of option"] == "InvalidArgument: model_loader_extra_config: step='1': give a value of type int"
    assert answers["nothing saved"].startswith("StepNotFound: nothing has been saved to")
    assert answers["no such step"].endswith("has no committed step 9; it has steps 1, 2")
    assert answers["no url"].startswith("InvalidArgument: ")
    assert "CKPT_DIR" in answers["no url"]
    assert "has the parts model: name that of the model" in answers["no prefix"]
    assert answers["wrong prefix"].startswith("LeafNotFound: no array of step 2")
    assert answers["prefix within the model"].startswith("LeafNotFound: the step lacks 15 weights of the model")


def test_a_step_that_does_not_fit_the_model_is_refused(loaded: Loaded) -> None:
    answers = loaded.answers
    assert answers["missing"] == (
        f"LeafNotFound: the step lacks 1 weights of the model, such as {O_PROJ}: check prefix "
        "and rename, or set strict to false"
    )
    assert "lacks 1 weights of the model, such as model.layers.0.mlp.up_proj.weight" in answers["missing part"]
    assert answers["shape"].startswith(("AssertionError", "ValueError", "RuntimeError"))
    assert answers["type"].startswith("LeafMismatch: leaf model.norm.weight of step")
    assert answers["damaged"].startswith("IntegrityError: leaf model.")


def test_options_choose_the_step_and_the_names_of_its_weights(loaded: Loaded) -> None:
    answers, newest = loaded.answers, loaded.from_step["digest"]
    assert len(answers["older"]) == len(answers["lenient"]) == 64
    assert answers["older"] != newest
    assert answers["half"] == answers["rounded"] != newest
    assert answers["renamed"] == newest


def test_tied_weights_are_loaded(tmp_path: Path) -> None:
    model = make_model(1, tied=True)
    exported, config = export(model, tmp_path)
    ckpt.save({"model": model}, tmp_path / "run", 1)
    found = load(config, "ckpt", {"url": str(tmp_path / "run"), "prefix": "model"})
    expected = load(exported, "safetensors", {})
    assert (found["digest"], found["logits"]) == (expected["digest"], expected["logits"])


def test_a_server_does_not_start_from_a_damaged_step(tmp_path: Path) -> None:
    model = make_model(1)
    _, config = export(model, tmp_path)
    flip_bit_of_leaf(ckpt.save(dict(model.state_dict()), tmp_path / "run", codec="none"), O_PROJ)
    found = load(config, "ckpt", {"url": str(tmp_path / "run")})
    assert found["error"].startswith("IntegrityError: leaf model.")


def test_an_update_takes_the_newest_step_and_keeps_the_old_weights_if_it_fails(tmp_path: Path) -> None:
    models = {seed: make_model(seed, vocabulary=32768) for seed in (1, 2)}  # large leaves, which have blocks of their own
    _, config = export(models[1], tmp_path)
    states = {seed: dict(model.state_dict()) for seed, model in models.items()}
    url = tmp_path / "run"
    ckpt.save(states[1], url, 1, codec="none")
    for name in ("damaged", "missing", "newer"):
        shutil.copytree(url, tmp_path / name)
    flip_bit_of_leaf(ckpt.save(states[2], tmp_path / "damaged", 2, codec="none"), "lm_head.weight")
    ckpt.save({n: t for n, t in states[2].items() if n != O_PROJ}, tmp_path / "missing", 2, codec="none")
    ckpt.save(states[2], tmp_path / "newer", 2, codec="none")

    actions = [["update", str(config)], ["update", str(tmp_path / "newer")]]
    for name in ("damaged", "missing", "newer"):
        actions += [["move", str(url), str(tmp_path / f"before {name}")], ["move", str(tmp_path / name), str(url)]]
        actions.append(["update", str(config)])
    actions.append(["load", {"url": str(url), "step": 2}])
    found = load(config, "ckpt", {"url": str(url)}, actions)
    first, newest = found["digest"], found["answers"][-1]
    same, path, damaged, missing, newer = [answer for answer in found["answers"][:-1] if answer is not None]
    assert first != newest

    assert (same["done"], same["digest"]) == (True, first)
    assert (path["done"], path["digest"]) == (False, first)
    assert f"give {config}, the path with which the server started" in path["message"]
    assert (damaged["done"], damaged["digest"]) == (False, first)
    assert "Failed to update weights: leaf lm_head.weight of step 2" in damaged["message"]
    assert (missing["done"], missing["digest"]) == (False, first)
    assert f"step 2 lacks 1 weights of step 1, such as {O_PROJ}" in missing["message"]
    assert (newer["done"], newer["digest"]) == (True, newest)


def test_two_tensor_parallel_ranks_load_their_parts_of_one_step(tmp_path: Path) -> None:
    model = make_model(1)
    exported, config = export(model, tmp_path)
    for rank in range(2):
        ckpt.save({"model": model}, tmp_path / f"rank{rank}" / "run", 1)
    ckpt.save({"model": make_model(2)}, tmp_path / "rank1" / "run", 2)  # as if the second rank looked later

    options = {"url": "run", "prefix": "model"}
    found = load_by_two(config, "ckpt", options, [tmp_path / "rank0", tmp_path / "rank1"])
    expected = load_by_two(exported, "safetensors", {}, [None, None])
    assert [rank["digest"] for rank in found] == [rank["digest"] for rank in expected]
    assert found[0]["digest"] != found[1]["digest"]
    assert found[0]["shapes"]["model.layers.0.self_attn.qkv_proj.weight"] == [96, 64]


def test_the_command_line_takes_the_format_and_others_are_unchanged() -> None:
    from sglang.srt.configs.load_config import LoadConfig, LoadFormat
    from sglang.srt.model_loader import get_model_loader
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    options = '{"url": "/data/run", "prefix": "model"}'
    arguments = ["--model-path", "x", "--device", "cpu", "--load-format", "ckpt", "--model-loader-extra-config", options]
    given = prepare_server_args(arguments)
    assert (given.load_format, given.model_loader_extra_config) == ("ckpt", options)

    for name in ("auto", "safetensors", "dummy", "pt"):
        assert LoadConfig(load_format=name).load_format is LoadFormat(name)
    assert type(get_model_loader(LoadConfig(load_format="safetensors"))) is DefaultModelLoader
    try:
        LoadConfig(load_format="ckpt2")
    except ValueError as error:
        assert "'ckpt2' is not a valid LoadFormat" in str(error)
    else:
        raise AssertionError("an unknown format is taken")


def test_without_the_plugin_sglang_does_not_know_the_format() -> None:
    program = (
        "from cpu_sglang import declare_operators; declare_operators()\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.configs.load_config import LoadConfig; LoadConfig(load_format='ckpt')"
    )
    env = {**os.environ, "SGLANG_PLUGINS": "another", "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert "ValueError: 'ckpt' is not a valid LoadFormat" in done.stderr
