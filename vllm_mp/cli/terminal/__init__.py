"""Output on a terminal: wrapped words, tables, errors, text that repeats itself."""
