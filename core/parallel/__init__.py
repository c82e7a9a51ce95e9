"""Tensor and pipeline parallelism: a model that several processes of one core compute together.

Each has its share of each layer, or of the layers, or both.

`group` is what the models call, `followers` what the core calls, and `worker_main` the program of the other ranks.
"""
