"""Modules under the names that programs import from `vllm.usage`."""
