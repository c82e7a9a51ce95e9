"""The commands below `vllm-mp bench`, and the load that they make."""
