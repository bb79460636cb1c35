"""Quantizing behind quantized layers: each matrix makes up for the errors before it."""
