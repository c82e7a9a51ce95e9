"""What a caller may ask for: parameters of sampling and pooling, constraints, adapters, embeddings."""
