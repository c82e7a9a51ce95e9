"""Running a step: the model, its device and its memory, sampling and pooling."""
