"""DeepSpeed below Trainer of transformers and below accelerate: a killed run that continues has the losses of a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.deepspeed_cpu import zero_config
from helpers.hf_runs import check_continuation, check_loop_continuation


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (3, True)])
def test_a_killed_trainer_continues_as_before(tmp_path: Path, stage: int, bf16: bool) -> None:
    config = zero_config(
        stage, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", bf16={"enabled": "auto"}
    )
    check_continuation(tmp_path, 5, 2, args={"deepspeed": config, "bf16": bf16})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_loop_of_accelerate_continues_as_before(tmp_path: Path, stage: int) -> None:
    check_loop_continuation(tmp_path, 2, samples=28, stage=stage)
