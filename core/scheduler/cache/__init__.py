"""The blocks of the KV cache: who has them, what they hold, and which of it requests find."""
