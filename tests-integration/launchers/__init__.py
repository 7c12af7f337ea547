"""The launchers that people use, started for real on one machine: what they start, and how to be sure that it ended."""
