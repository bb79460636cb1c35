"""The command line: flags, and what is said on a terminal."""
