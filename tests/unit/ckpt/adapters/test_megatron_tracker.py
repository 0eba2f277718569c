"""The tracker of Megatron-Bridge is repaired only if the checkpoint that it names is known to be incomplete."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ckpt.adapters.megatron_tracker import TRACKERS, repair_tracker  # noqa: E402


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 and 2; the tracker names the second."""
    for step in (1, 2):
        checkpoint = tmp_path / f"iter_{step:07}"
        checkpoint.mkdir()
        torch.save({"step": torch.tensor(step)}, checkpoint / "train_state.pt")
        (checkpoint / "run_config.yaml").write_text("a: 1\n")
    shutil.copy(tmp_path / "iter_0000002" / "train_state.pt", tmp_path / TRACKERS[0])
    return tmp_path


def named_step(folder: Path) -> int:
    return int(torch.load(folder / TRACKERS[0])["step"])


@pytest.mark.parametrize("name", ["train_state.pt", "run_config.yaml"])
def test_a_checkpoint_that_cannot_be_read_now_stays_the_newest(folder: Path, name: str) -> None:
    file = folder / "iter_0000002" / name
    file.unlink()
    file.symlink_to(name)  # open(2) and stat(2) fail with ELOOP
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        repair_tracker(str(folder), lambda _: True)
    assert named_step(folder) == 2


@pytest.mark.parametrize("name", ["train_state.pt", "run_config.yaml"])
@pytest.mark.parametrize("is_torn", [False, True])
def test_an_incomplete_checkpoint_is_not_the_newest(folder: Path, name: str, is_torn: bool) -> None:
    file = folder / "iter_0000002" / name
    file.unlink()
    if is_torn:
        file.touch()
    repair_tracker(str(folder), lambda _: True)
    assert named_step(folder) == 1
