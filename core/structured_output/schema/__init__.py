"""JSON schemas: checks, and rewriting to schemas that the libraries compile exactly."""
