"""Bytes on disk: GGUF files, split models, importance matrices, Hessians."""
