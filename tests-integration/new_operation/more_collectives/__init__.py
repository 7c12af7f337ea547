"""A package that adds an operation to the table, and a backend that implements it."""
