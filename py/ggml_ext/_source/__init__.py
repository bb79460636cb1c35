"""Sources of a model: GGUF files, checkpoints, the Hugging Face hub."""
