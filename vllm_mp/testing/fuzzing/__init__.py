"""Hostile frames, sent to a core or to a client."""
