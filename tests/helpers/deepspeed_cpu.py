"""Settings with which DeepSpeed trains on the CPU."""

from __future__ import annotations

from typing import Any


def use_gloo() -> None:
    """Let DeepSpeed communicate with gloo; otherwise it compiles operators of its own at the start."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def zero_config(stage: int, **more: Any) -> dict[str, Any]:
    """Return a configuration with the optimizer that torch or the script has."""
    return {
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9, **more,
    }  # fmt: skip
