"""Whether an engine loads a folder that DeepSpeed itself has saved, or a step. DeepSpeed itself is not needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.adapters import deepspeed
from ckpt.adapters.deepspeed import _is_deepspeed_folder, attach

FOLDER = "a folder of DeepSpeed"


class Engine:
    """Stands for an engine of DeepSpeed."""

    micro_steps = 0

    def __init__(self) -> None:
        self.global_steps = 0

    def gradient_accumulation_steps(self) -> int:
        return 1

    def load_checkpoint(self, *arguments: Any) -> tuple[str, dict[str, Any]]:
        return FOLDER, {}

    def save_checkpoint(self, *arguments: Any, **options: Any) -> bool:
        raise NotImplementedError


def engine_state(engine: Engine, tag: str | None = None, **options: Any) -> dict[str, Any]:
    return {"engine": {"tag": tag}} if tag is not None else {"engine": {}}


def started(monkeypatch: pytest.MonkeyPatch, url: Path | None) -> tuple[Any, Any]:
    """Return an engine with a repository, as at the start of a job, and the object that saves it."""
    monkeypatch.setattr(deepspeed, "EngineState", engine_state)
    engine = Engine()
    return engine, attach(engine, url, defer=False, group=None)


def save(engine: Any, attached: Any, folder: Path, step: int, tag: str | None = None) -> None:
    engine.global_steps = step
    engine.save_checkpoint(folder, tag)
    attached.last_save.result()


def deepspeed_folder(root: Path, tag: str) -> Path:
    (root / tag).mkdir(parents=True)
    (root / tag / "mp_rank_00_model_states.pt").touch()
    return root


def test_a_step_takes_precedence_over_a_folder_that_deepspeed_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, url = deepspeed_folder(tmp_path / "own", "best"), tmp_path / "run"
    engine, attached = started(monkeypatch, url)
    assert engine.load_checkpoint(own)[0] == FOLDER
    save(engine, attached, own, 30)
    attached.close()
    engine, attached = started(monkeypatch, url)
    assert engine.load_checkpoint(own)[0] == f"file://{url}/global_step30"
    assert engine.load_checkpoint(own, load_module_only=True)[0] == FOLDER
    assert engine.load_checkpoint(own, tag="best")[0] == FOLDER
    save(engine, attached, own, 40, "best")
    assert engine.load_checkpoint(own, tag="best")[0] == f"file://{url}/global_step40"
    attached.close()


def test_a_folder_to_which_deepspeed_and_ckpt_have_saved_gives_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, attached = started(monkeypatch, None)
    save(engine, attached, tmp_path / "out", 30)
    attached.close()
    deepspeed_folder(tmp_path / "out", "global_step20")
    engine, attached = started(monkeypatch, None)
    assert engine.load_checkpoint(tmp_path / "out")[0] == f"file://{tmp_path}/out/global_step30"
    assert engine.load_checkpoint(deepspeed_folder(tmp_path / "old", "global_step5"))[0] == FOLDER
    assert not (tmp_path / "old" / "ckpt.json").exists()
    assert ckpt.open(tmp_path / "out").steps() == [30]
    attached.close()


@pytest.mark.parametrize("tag", ["global_step5", "run[1]", "best?", "*"])
def test_a_tag_is_a_name_and_no_pattern(tmp_path: Path, tag: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mp_rank_00_model_states.pt").touch()
    assert not _is_deepspeed_folder(tmp_path, tag)
    (tmp_path / tag).mkdir()
    (tmp_path / tag / "mp_rank_00_model_states.pt").touch()
    assert _is_deepspeed_folder(tmp_path, tag)
    assert _is_deepspeed_folder(tmp_path, None)
