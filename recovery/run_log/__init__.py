"""The run log, which all hosts of a run read and append to, and the reports of their agents.

Each position of the log is written once, by one writer. This package imports `policy` and `goodput`. Start with `base`, then
`run_state`, which computes the current state of a run from its log.
"""
