"""Which type each tensor gets."""
