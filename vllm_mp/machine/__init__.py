"""The machine: processors, memory, files, descriptors, exit statuses, the log."""
