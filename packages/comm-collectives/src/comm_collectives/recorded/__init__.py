"""Recording of calls: a wrapper around a backend, and what reads what it recorded."""
