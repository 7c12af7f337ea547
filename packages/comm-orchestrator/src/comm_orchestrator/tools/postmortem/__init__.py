"""``commctl postmortem``: find out from the rings of a job what went wrong."""
