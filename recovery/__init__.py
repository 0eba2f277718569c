"""Brings a training job back: agents that start ranks and watch them, and a log of the run that decides what happens next.

It promises that every decision follows from the log alone, so that any host that reads the same log decides the same. It
imports `ckpt` and what is below, and is used by `ckpt-run`.

Start with `policy.decide`, then `run_log.base`, `coordinator.coordinator` and `agent.agent`.
"""
