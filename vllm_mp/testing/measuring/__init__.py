"""Measurements that several tools share: loads, peers, reports."""
