"""Faults brought about on running engines, and the judgement of what their users saw."""
