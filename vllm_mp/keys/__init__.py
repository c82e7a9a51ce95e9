"""Keys of clients, cores and operators, for connections over TCP."""
