"""Prompts: their forms, chat templates, and the tokenizer with its batches."""
