"""The memory tier of a run: storage nodes in the memory of its hosts, which outlive the ranks.

Guarantees: the steps in it outlive the ranks, the agent and the process that serves them, but not the host. Used by `agent`; it
imports `ranks` and the packages below it. Start with `memory_nodes`.
"""
