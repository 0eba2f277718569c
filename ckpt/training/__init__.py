"""Helpers of the training loop: a rank's heartbeat page, its losses, the save interval, the data position.

Guarantees: heartbeats, losses and the schedule of saves make no step wait, unless it is saved or stopped, or a device is more
than 64 results behind. Used by `tiers` and the modules above it, by `recovery`, and by training programs, which import
`heartbeat_marks` as `ckpt.pulse` and `data_loader` as `ckpt.data`. It imports `groups`, and of `saving` only the handle. Start
with `heartbeat_page`.
"""
