"""Encode tensors and measure their errors."""
