"""Faults that are made in the code on purpose, to see which tests catch them."""
