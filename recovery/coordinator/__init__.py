"""Appends the next entries of the log of a run: each agent has a coordinator, and one of them leads.

It imports `run_log` and `policy`. Start with `coordinator`; `transitions` computes the entries, and is pure.
"""
