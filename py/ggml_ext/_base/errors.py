"""Errors that a user can act on."""


class UserError(Exception):
    """An error in one line: what was found, what was needed and the way out. The process exits with 1."""
