"""Report results: tables, JSON, model cards and pictures."""
