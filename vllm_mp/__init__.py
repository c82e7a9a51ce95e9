"""vllm_mp."""
