"""Rendezvous: the ranks connect, compare the values that must agree, and start together."""
