"""Anthropic's API: /v1/messages, and the count of its tokens."""
