"""What a user starts: an engine with its cores, its input, its statistics and its adapters."""
