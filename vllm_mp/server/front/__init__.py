"""The processes of a server: listening sockets, front processes and their parent."""
