"""The run log, which all hosts of a run read and append to, and the reports of their agents.

Guarantees: each position of the log is written once, by one writer. Used by `coordinator` and the packages above it; it imports
`policy` and `goodput`. Start with `base`, then `run_state`, which computes the current state of a run from its log.
"""
