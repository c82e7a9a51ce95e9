"""Having a core: its process, the connection to it, its supervision and its replacement."""
