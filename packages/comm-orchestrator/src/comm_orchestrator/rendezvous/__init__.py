"""How the ranks find each other, compare what has to be the same, and start together."""
