"""The endpoint `/v1/responses`: its input, its output and its events."""
