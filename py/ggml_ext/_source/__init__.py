"""The model that is read: a GGUF file, a checkpoint, the Hugging Face hub."""
