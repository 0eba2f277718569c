"""Whether a folder has a checkpoint of DeepSpeed itself, by the name of its tag."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.adapters.deepspeed import _is_deepspeed_folder


@pytest.mark.parametrize("tag", ["global_step5", "run[1]", "best?", "*"])
def test_a_tag_is_a_name_and_no_pattern(tmp_path: Path, tag: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mp_rank_00_model_states.pt").touch()
    assert not _is_deepspeed_folder(tmp_path, tag)
    (tmp_path / tag).mkdir()
    (tmp_path / tag / "mp_rank_00_model_states.pt").touch()
    assert _is_deepspeed_folder(tmp_path, tag)
    assert _is_deepspeed_folder(tmp_path, None)
