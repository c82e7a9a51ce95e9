"""Flags that commands share, and the parser of command lines."""
