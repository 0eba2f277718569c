"""Names of what DeepSpeed counts, which the adapter saves and ckpt-import reads from DeepSpeed's own files."""

from __future__ import annotations

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of an engine."""

SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What the state of a loss scaler consists of."""
