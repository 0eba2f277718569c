"""Restarts a training job after failures: agents start and watch its ranks, the run log decides what is next.

Every decision follows from the log alone, so any host that reads the same log makes the same decision. This package imports
`ckpt` and the layers below it. `ckpt-run` uses it.

Start with `policy.restart_decision`, then `run_log.base`, `coordinator.coordinator` and `agent.agent`.
"""
