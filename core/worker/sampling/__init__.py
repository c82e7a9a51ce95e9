"""From logits to tokens: logits processors, sampling filters, log-probabilities, pooled vectors."""
