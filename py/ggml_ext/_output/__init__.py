"""The files that are written."""
