"""The commands about the models in the cache."""
