"""Restarts a training job after failures: agents start and watch its ranks, the run log decides what is next.

Guarantees: every decision follows from the log alone, so any host that reads the same log makes the same decision. Used by
`ckpt-run` (`tools`); it imports `ckpt` and the layers below it.

Start with `policy.restart_decision`, then `run_log.base`, `coordinator.coordinator` and `agent.agent`.
"""
