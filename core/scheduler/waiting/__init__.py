"""Requests that wait: their order, turns of clients and adapters, quotas."""
