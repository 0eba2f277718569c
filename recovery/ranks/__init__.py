"""The processes of one host: starts and watches ranks, and ends them with all that they started.

This package imports `coordinator` and the packages below it. Start with `launch`, then `rank_monitor`. `fork_server` runs as
a process of its own and forks ranks that have already imported their modules.
"""
