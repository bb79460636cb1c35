"""Bytes on disk: GGUF files, split models, imatrix files, Hessians."""
