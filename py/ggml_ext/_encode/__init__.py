"""From weights to blocks and back, and the error that this makes."""
