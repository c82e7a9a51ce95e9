"""Where a core causes faults in itself, for tests."""
