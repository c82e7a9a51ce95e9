"""Reading a GGUF file: its fields, its tensors, and the configuration that they give."""
