"""Paged attention in Triton: decodes, prefills, and the keys that both read."""
