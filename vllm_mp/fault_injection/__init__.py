"""Faults that a core injects into itself: the option's language, and the hooks that carry it out."""
