"""What a model's folder says: architecture, rope, quantization, pooling and generation defaults."""
