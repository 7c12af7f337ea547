"""``commctl tune``: measure how this host moves data in shared memory, and keep it for the groups to come."""
