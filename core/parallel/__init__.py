"""Tensor parallelism: a model that several processes of one core compute together, each with its shard.

`group` is what the models call, `followers` what the core calls, and `worker_main` the program of the other ranks.
"""
