"""Pure functions that decide about a run: after a failure, about a hung rank, after a bad loss.

They use no clock, disk or network, so the coordinator and the simulator call the same code. This package imports nothing
else of recovery. Start with `failure` and `restart_decision`.
"""
