"""The foundation of all packages: errors, signals, threads, files, text, and the generated table of types."""
