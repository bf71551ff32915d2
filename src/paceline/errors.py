"""The one exception class that the command line turns into one clear line."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can mend; the message names the value and the fix.

    The message is one line. It is a `ValueError`, so library callers need no import to
    catch it.
    """
