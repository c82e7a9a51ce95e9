"""What comes back from a core: tokens turned into text, streams and outputs."""
