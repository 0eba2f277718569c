"""Appends the next entries of the run log. Each agent has a coordinator, and one of them leads.

Guarantees: of two coordinators that both lead for a moment, only one appends at each position of the log. Used by `agent` and
`tools`; it imports `run_log` and `policy`. Start with `coordinator`. `transitions` computes the entries, as pure functions.
"""
