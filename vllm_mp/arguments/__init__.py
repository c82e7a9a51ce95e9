"""How options and parameters are declared, and which of vLLM's are not served."""
