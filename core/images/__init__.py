"""Images in prompts: those that clients have sent, where they stand in requests, and what the model sees of them."""
