"""Endpoints for vectors, classes and scores of texts."""
