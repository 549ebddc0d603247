"""The CPU backend: C loops over the 4-bit weights."""
