"""The families of native models: what each reads from config.json, and their registry."""
