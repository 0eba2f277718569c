"""Helpers that several tests share: states, repositories, processes, nodes, servers, jobs, and their fixtures."""
