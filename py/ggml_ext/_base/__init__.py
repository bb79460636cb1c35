"""What every room stands on: errors, signals, threads, files, text, and the generated table of types."""
