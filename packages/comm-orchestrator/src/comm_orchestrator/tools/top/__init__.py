"""``commctl top``: see what the ranks of a running job do."""
