"""The commands without a command line, for the terminal and the Python API."""
