"""Programs that tests start as processes: ranks, jobs, servers."""
