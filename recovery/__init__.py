"""Restarts a training job after failures: agents start and watch its ranks, and follow the entries of a run log.

Guarantees: the state of a run follows from its log alone, so all hosts that have read the same entries agree on it. One agent
leads, and decides by this state and by the reports of all agents. Used by `ckpt-run` (`tools`); it imports `ckpt` and the
layers below it.

Start with `policy.restart_decision`, then `run_log.base`, `coordinator.coordinator` and `agent.agent`.
"""
