"""Lightning's own checkpoints through the plugin CkptIO: ModelCheckpoint, save_checkpoint, ckpt_path and Fabric."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.refusal import refused
from lightning.fabric import Fabric
from lightning.fabric import strategies as fabric_strategies
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from ckpt.adapters.lightning import CkptIO
from ckpt.errors import FormatError, InvalidArgument, UnsupportedLeaf


class Model(BoringModel):
    extra: Any = None
    losses = (4.0, 3.0, 2.0, 1.0, 0.5)
    """The loss of the validation of each epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses[self.current_epoch])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.extra is not None:
            checkpoint["extra"] = self.extra


def trainer(folder: Path, epochs: int, plugin: Any = None, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", max_epochs=epochs, limit_train_batches=5, limit_val_batches=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder / "files", monitor="val_loss", save_top_k=2, **options)],
        plugins=[plugin or CkptIO(folder / "repositories")],
    )  # fmt: skip


@pytest.mark.parametrize("last", [True, "link"])
def test_the_best_are_kept_and_the_last_is_resumed(tmp_path: Path, last: Any) -> None:
    first = trainer(tmp_path, 2, save_last=last)
    first.fit(Model())
    files = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert files == ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt", "last.ckpt"]
    assert (tmp_path / "files" / "last.ckpt").stat().st_size < 1000

    second = trainer(tmp_path, 4, save_last=last)
    second.fit(Model(), ckpt_path="last")
    assert second.global_step == 20
    files = list((tmp_path / "files").iterdir())
    assert len(files) == 3
    repositories = len(list((tmp_path / "repositories").iterdir()))
    assert repositories == sum(not path.is_symlink() for path in files)  # those of removed checkpoints are deleted
    second.validate(Model(), ckpt_path="best")


def test_saves_in_the_background_by_the_wrapper_of_lightning(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(CkptIO(tmp_path / "repositories"))
    first = trainer(tmp_path, 2, plugin, save_last=True)
    first.fit(Model())
    second = trainer(tmp_path, 3, AsyncCheckpointIO(CkptIO(tmp_path / "repositories")), save_last=True)
    second.fit(Model(), ckpt_path="last")
    assert second.global_step == 15
    assert len(list((tmp_path / "repositories").iterdir())) == 3


def test_the_repository_of_a_file_that_lightning_replaces_by_a_link_is_deleted(tmp_path: Path) -> None:
    """The third epoch is none of the best, so its file is last.ckpt itself. The fourth is one, and last.ckpt becomes a link."""
    first = trainer(tmp_path, 2, save_last="link")
    first.fit(Model())
    model = Model()
    model.losses = (4.0, 3.0, 5.0, 1.0, 0.5)
    second = trainer(tmp_path, 4, save_last="link")
    second.fit(model, ckpt_path="last")
    last = tmp_path / "files" / "last.ckpt"
    assert last.is_symlink()
    assert last.resolve().name == "epoch=3-step=20.ckpt"
    assert len(list((tmp_path / "repositories").iterdir())) == 2
    assert CkptIO(tmp_path / "repositories").load_checkpoint(last)["global_step"] == 20


def test_a_folder_of_files_may_be_deleted_during_a_training(tmp_path: Path) -> None:
    plugin = CkptIO(tmp_path / "repositories")
    for folder in ("first", "second"):
        plugin.save_checkpoint({"number": 1}, tmp_path / folder / "a.ckpt")
        assert plugin.load_checkpoint(tmp_path / folder / "a.ckpt") == {"number": 1}
        shutil.rmtree(tmp_path / folder)
    plugin.teardown()


@pytest.mark.essential
def test_saved_checkpoint_is_loaded_without_pickle(tmp_path: Path) -> None:
    model, plugin = Model(), CkptIO(tmp_path / "repositories")
    one = trainer(tmp_path, 1, plugin)
    one.fit(model)
    for _ in range(2):  # the second replaces the first
        one.save_checkpoint(tmp_path / "one.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "one.ckpt")
    assert torch.equal(loaded["state_dict"]["layer.weight"], model.layer.weight)
    assert loaded["global_step"] == 5
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "one.ckpt")


def test_copied_file_does_not_delete_the_checkpoint(tmp_path: Path) -> None:
    plugin = CkptIO(tmp_path / "repositories")
    plugin.save_checkpoint({"x": torch.ones(3)}, tmp_path / "one.ckpt")
    (tmp_path / "two.ckpt").write_bytes((tmp_path / "one.ckpt").read_bytes())
    plugin.save_checkpoint({"x": torch.zeros(3)}, tmp_path / "two.ckpt")
    plugin.remove_checkpoint(tmp_path / "two.ckpt")
    assert plugin.load_checkpoint(tmp_path / "one.ckpt")["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("is_in_environment", [False, True])
def test_a_checkpoint_is_found_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_environment: bool
) -> None:
    monkeypatch.setenv("CKPT_DIR", "repositories")
    url = None if is_in_environment else "repositories"
    file, elsewhere = tmp_path / "files" / "one.ckpt", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    CkptIO(url).save_checkpoint({"number": 1}, file)
    monkeypatch.chdir(elsewhere)
    assert CkptIO(url).load_checkpoint(file) == {"number": 1}
    CkptIO(url).remove_checkpoint(file)
    assert not list((tmp_path / "repositories").iterdir())
    assert not list(elsewhere.iterdir())


def test_file_of_torch_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "old.ckpt")
    with pytest.raises(FormatError, match=r"old\.ckpt was not written by CkptIO: load it in a Trainer without this plugin"):
        CkptIO(tmp_path).load_checkpoint(tmp_path / "old.ckpt")


def test_value_that_needs_pickle_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    model, plugin = Model(), CkptIO(tmp_path / "repositories")
    one = trainer(tmp_path, 1, plugin)
    one.fit(model)
    one.save_checkpoint(tmp_path / "one.ckpt")
    model.extra = {"rule": len}
    with pytest.raises(UnsupportedLeaf, match=r"extra\.rule"):
        one.save_checkpoint(tmp_path / "one.ckpt")
    assert plugin.load_checkpoint(tmp_path / "one.ckpt")["global_step"] == 5


class Sharded(BoringModel):
    def configure_model(self) -> None:
        pass


@pytest.mark.skipif(not hasattr(strategies, "ModelParallelStrategy"), reason="a newer version of Lightning has it")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_strategy_that_would_ignore_the_plugin_is_refused(tmp_path: Path, is_wrapped: bool) -> None:
    plugin = CkptIO(tmp_path / "repositories")
    with refused(InvalidArgument, "ModelParallelStrategy", "ignores plugins=[CkptIO(url)]", "callbacks=[Checkpoints("):
        pl.Trainer(
            accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, logger=False, enable_progress_bar=False,
            default_root_dir=tmp_path, strategy=strategies.ModelParallelStrategy(process_group_backend="gloo"),
            plugins=[AsyncCheckpointIO(plugin) if is_wrapped else plugin],
        ).fit(Sharded())  # fmt: skip
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.skipif(not hasattr(fabric_strategies, "ModelParallelStrategy"), reason="a newer version of Fabric has it")
def test_a_sharded_strategy_of_fabric_refuses_the_plugin_itself(tmp_path: Path) -> None:
    strategy = fabric_strategies.ModelParallelStrategy(lambda model, mesh: model, process_group_backend="gloo")
    with pytest.raises(NotImplementedError, match="does not support setting a `CheckpointIO` plugin"):
        Fabric(accelerator="cpu", devices=1, strategy=strategy, plugins=[CkptIO(tmp_path / "repositories")])


@pytest.mark.essential
def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", plugins=[CkptIO(tmp_path / "repositories")])
    module = torch.nn.Linear(2, 2)
    module, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(module(torch.ones(1, 2)).sum())
    optimizer.step()
    state = {"module": module, "optimizer": optimizer, "step": 3}
    fabric.save(os.fspath(tmp_path / "one.ckpt"), state)
    weight = module.weight.clone()
    with torch.no_grad():
        module.weight.zero_()
    state["step"] = 0
    fabric.load(os.fspath(tmp_path / "one.ckpt"), state)
    assert torch.equal(module.weight, weight)
    assert state["step"] == 3
