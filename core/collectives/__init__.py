"""Groups of ranks: sums, gathers, and queues of tensors between stages."""
