"""The pages of mapped memory: which of them a process has mapped, and which are huge."""
