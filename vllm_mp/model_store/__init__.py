"""Where a model's files come from: an alias, a folder, a GGUF file, the hub or a Python package."""
