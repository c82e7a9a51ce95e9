"""Models that run through the modules of the library transformers."""
