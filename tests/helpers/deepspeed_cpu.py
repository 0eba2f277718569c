"""Settings with which DeepSpeed trains on the CPU."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from packaging.version import Version


def converts_groups_of_stage_3() -> bool:
    """Return whether ds_to_universal of this DeepSpeed can convert stage 3 with two groups of parameters (its change 7585)."""
    return Version(version("deepspeed")) >= Version("0.18.0")


def zero_options(stage: int) -> dict[str, Any]:
    """Return the options of zero_optimization with which a stage computes the same on the CPU in each run.

    DeepSpeed gathers all parameters that stay whole after a step. Before 0.19.8 it then waits for the last gather only, which
    is right for NCCL. With gloo, the others may not have ended, and the model computes with memory that has no value yet
    (its change 8539). Without such parameters, it gathers each layer when it is used, and waits for it. With a newer version,
    the parameters of up to 100 elements stay whole.
    """
    waits = Version(version("deepspeed")) >= Version("0.19.8")
    return {"stage": stage} | ({"stage3_param_persistence_threshold": 100 if waits else 0} if stage == 3 else {})


def use_gloo() -> None:
    """Let DeepSpeed communicate with gloo; otherwise it compiles operators of its own at the start.

    Let it also train in fp16 on a processor without instructions for that, where torch computes it more slowly.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def zero_config(stage: int, **more: Any) -> dict[str, Any]:
    """Return a configuration with the optimizer that torch or the script has."""
    return {
        "zero_optimization": zero_options(stage), "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9, **more,
    }  # fmt: skip
