"""What tests and tools share: engines, prompts, random models, comparison with transformers, faults, fuzzing."""
