"""What came of a run, in words, tables, JSON and pictures."""
