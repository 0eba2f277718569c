"""Decisions about a run, as pure functions: what to do after a failure, when a rank hangs, what a bad loss means.

No clock, disk or network: the coordinator and the simulator call the same code. It imports nothing else of recovery. Start
with `decide`.
"""
