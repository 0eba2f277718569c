"""Batches that a loop of accelerate skips: the order of the epochs is that of a loop without a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
accelerate = pytest.importorskip("accelerate", reason="accelerate is missing")

from ckpt.adapters.accelerate import attach  # noqa: E402  needs accelerate


def prepared(folder: Path) -> tuple[Any, Any, Any]:
    """Return an accelerator, its loader of four batches, and the attached repository."""
    accelerate.utils.set_seed(0)
    configuration = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(dataloader_config=configuration, cpu=True)
    data = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)
    data = accelerator.prepare(data)
    return accelerator, data, attach(accelerator, folder)


def later_epochs(accelerator: Any, data: Any) -> list[list[Any]]:
    """Return the batches of the next three epochs; the second skips two batches."""
    return [
        [batch.tolist() for batch in data],
        [batch.tolist() for batch in accelerator.skip_first_batches(data, 2)],
        [batch.tolist() for batch in data],
    ]


def test_an_epoch_with_skipped_batches_counts_after_a_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Otherwise the next epoch repeats its order."""
    accelerator, data, attached = prepared(tmp_path / "run")
    for number, _ in enumerate(data):
        if number == 3:
            accelerator.save_state("step_1").result()
    whole = later_epochs(accelerator, data)
    attached.close()
    accelerator, data, attached = prepared(tmp_path / "run")
    accelerator.load_state("step_1")
    assert [*accelerator.skip_first_batches(data, 4)] == []
    assert later_epochs(accelerator, data) == whole
    assert whole[1] != whole[2][2:], "each epoch has an order of its own"
    attached.close()
