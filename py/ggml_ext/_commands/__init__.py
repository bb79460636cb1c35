"""What the commands and the Python API do: quantize, export, inspect, without a command line."""
