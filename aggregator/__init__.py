"""Many nodes as one namespace: membership, placement, redundancy, repair. Empty until storage nodes exist."""
