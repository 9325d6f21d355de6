"""What is the user's to mend."""


class UserError(ValueError):
    """One message that names the value, what was expected and how to mend it; no traceback."""
