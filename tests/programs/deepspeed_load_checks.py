"""One rank under torchrun, for tests/integration/deepspeed: which step `load_checkpoint` of an engine finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.torchrun import run_checks

import ckpt
from ckpt.adapters.deepspeed import attach
from ckpt.storage.base.failpoints import set_failpoints
from programs.deepspeed_checks import require_same, trained_engine, whole_state
from programs.deepspeed_training import make_engine, train_step

ROOT = Path()  # set by `run_checks`


def load_tag_of_running_save() -> None:
    """A tag that was used before is that of the newest save, also while this save runs."""
    engine = trained_engine(2, "bf16", 1)
    attached = attach(engine, ROOT / "running")
    engine.save_checkpoint("unused", tag="best")
    train_step(engine, 1)
    set_failpoints("save.commit=sleep:5" if dist.get_rank() == 0 else "")
    engine.save_checkpoint("unused", tag="best")
    expected = whole_state(engine)
    train_step(engine, 2)
    assert engine.load_checkpoint("unused", tag="best")[0] == f"file://{ROOT}/running/global_step2"
    require_same(whole_state(engine), expected)
    set_failpoints("")
    attached.close()


def save_to_tiers_and_die() -> None:
    """Save two steps to two tiers; the last one is not copied to the second tier. The process is killed then."""
    engine = trained_engine(1, "bf16", 1)
    attached = attach(engine, ROOT / "tiers" / "far", tiers=[ckpt.Tier(ROOT / "tiers" / "near")])
    engine.save_checkpoint("unused", tag="first")
    attached._saver("unused").wait()
    train_step(engine, 1)
    set_failpoints("promote.commit=kill")
    engine.save_checkpoint("unused", tag="second", client_state={"epoch": 7})
    attached._saver("unused").wait()


def load_from_the_near_tier() -> None:
    """A job that was killed before a step was copied continues from it, and reads its tag and client_state."""
    for tag in None, "second":
        engine = make_engine(2, "bf16", seed=4)
        attached = attach(engine, ROOT / "tiers" / "far", tiers=[ckpt.Tier(ROOT / "tiers" / "near")])
        set_failpoints("promote.commit=error@*")
        path, client_state = engine.load_checkpoint("unused", tag=tag)
        assert path is not None
        assert path.endswith("/global_step2")
        assert client_state == {"epoch": 7}
        assert engine.global_steps == 2
        with pytest.raises(ckpt.CkptError):
            attached.close()
        set_failpoints("")


if __name__ == "__main__":
    run_checks(globals())
