"""A member behind the network: the server of a node, its client, and the messages between them.

The server listens on loopback unless it is configured otherwise, and requires a token and TLS beyond it. Clients on the same
host receive open file descriptors instead of bytes (`fd_passing_server`, `fd_passing_client`). It imports `member` and what is
below. Start with `wire`, then `server`.
"""
