"""The log of a run that all its hosts read and append to, and the reports of its agents.

It promises that an entry is appended at one position by one writer, or not at all. It imports `policy`. Start with `base`, then
`run_state`, which folds the log into the present state.
"""
