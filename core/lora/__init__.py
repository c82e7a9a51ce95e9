"""LoRA adapters: reading them, and their memory on the device."""
