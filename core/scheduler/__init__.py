"""Which requests run in each step, and where their keys and values lie."""
