"""Sequential quantization: each matrix compensates the errors of earlier ones."""
