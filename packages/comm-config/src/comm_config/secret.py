"""Name the variable that holds the secret of a job.

It is no setting, so that no listing of settings shows its value.
"""

__all__ = ["SECRET_VARIABLE"]

SECRET_VARIABLE = "COMM_JOB_SECRET"
"""Random text of at least 16 characters, the same on every rank of a job over several hosts."""
