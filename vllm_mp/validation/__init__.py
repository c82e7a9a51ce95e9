"""Checks of requests and calls that need the configuration; the client makes them, and the core again."""
