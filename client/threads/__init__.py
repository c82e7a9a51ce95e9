"""Calls between threads and the event loop."""
