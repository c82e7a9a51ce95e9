"""A model's weights: read from a checkpoint, converted from GGUF, or random."""
