"""The hot operations: contracts, definitions, Triton and C++ implementations."""
