"""What several tests use: states, repositories, processes, nodes, servers, jobs, and the fixtures of these."""
