"""The processes of one host: starts and watches ranks, and ends them with all that they started.

Guarantees: when the ranks of an attempt are ended, all processes that they have started end too, except one that has both
left its session and removed the mark of the agent (CKPT_AGENT) from its environment. Used by `memory_tier` and the
packages above it; it imports `run_log` and the packages below it. Start with `launch`, then `rank_monitor`. `fork_server`
runs as a process of its own and forks ranks that have already imported their modules.
"""
