"""The goodput ledger of a run, which accounts for every second, and a simulator of runs with failures.

Guarantees: each second of a run has one category, so their sum is the wall time. Used by `run_log` and the packages above it;
it imports `policy`. Start with `ledger`.
"""
