"""Errors that a user can act on."""


class UserError(Exception):
    """One line for stderr: what was found, where, what was needed and the way out. The process exits with 1."""
