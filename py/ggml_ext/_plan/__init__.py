"""Plan the type of each tensor."""
