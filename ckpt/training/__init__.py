"""Helpers of the training loop: a rank's heartbeat page, its losses, the save interval, the data position.

Guarantees: nothing here makes a training step wait. Used by `tiers` and the modules above it, by `recovery`, and by training
programs, which import `heartbeat_page` as `ckpt.pulse` and `data_loader` as `ckpt.data`. It imports `groups`, and of `saving`
only the handle. Start with `heartbeat_page`.
"""
