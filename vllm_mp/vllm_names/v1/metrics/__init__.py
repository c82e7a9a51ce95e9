"""Modules under the names that programs import from `vllm.v1.metrics`."""
