"""Command line, log, reports, model cards, pictures."""
