"""Several tokens a step: drafts of what comes next, which the model verifies in one step."""
