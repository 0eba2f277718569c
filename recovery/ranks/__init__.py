"""The processes of one host: starting ranks, watching them, ending them with all that they started.

It imports `coordinator` and what is below. Start with `launch`, then `rank_monitor`. `fork_server` runs as a process of its own
and forks ranks that have their imports done.
"""
