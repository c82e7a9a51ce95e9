"""Endpoints for operators, whose calls affect all clients of the engine."""
