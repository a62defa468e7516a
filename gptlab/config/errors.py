"""Exit codes, and UserError: one line on stderr and exit code 2. Any other exception that reaches the user is a bug."""

from __future__ import annotations

import difflib
import errno
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_USAGE = 2  # wrong usage, input or environment
EXIT_TRAINING_FAILED = 3  # or a process of several was lost
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: a signal stopped the run, and it can be resumed
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

MAX_MESSAGE_CHARACTERS = 2000
MAX_VALUE_CHARACTERS = 300
MAX_NAME_CHARACTERS = 100
MAX_NAMES = 1000


class UserError(Exception):
    """Wrong usage, input or environment: a single line that says what, why, and what would work."""


class ConfigError(UserError):
    """An invalid configuration: names the field, its value, the reason, and the nearest valid choice."""

    def __init__(self, field: str, value: object, reason: str, nearest: object = None) -> None:
        self.field = field
        self.value = value
        self.reason = reason
        self.nearest = nearest
        hint = "" if nearest is None else f" (nearest valid: {nearest})"
        super().__init__(f"{field} = {_shown(value)}: {reason}{hint}")


@contextmanager
def paths_of_the_user() -> Iterator[None]:
    """Turns errors about a path that is too long, loops or may not be read into a UserError, wherever they are raised:
    every command has options that are paths."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES) or error.filename is None:
            raise
        raise UserError(f"cannot use {_shown(str(error.filename))}: {error.strerror}") from error


@contextmanager
def cannot(what: str) -> Iterator[None]:
    """Turns an OSError within the context into a UserError, "cannot WHAT: REASON"."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {what}: {error.strerror or error}") from error


def one_line(error: BaseException) -> str:
    """The message as a single line of bounded length, without control characters.

    Parts of it may come from an untrusted file, which must neither fill nor control the terminal.
    """
    text = printable(" ".join(str(error)[: 2 * MAX_MESSAGE_CHARACTERS].split()))
    return shortened(text, MAX_MESSAGE_CHARACTERS)


def printable(text: str, keep: str = "\n") -> str:
    """The text without control characters, but those of `keep`: names and values from an untrusted folder must not
    control the terminal."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and `...` where it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _shown(value: object) -> str:
    return shortened(repr(value), MAX_VALUE_CHARACTERS)


def nearest_name(word: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `word`; None if none is similar."""
    # Names in an untrusted file may be very long, and comparing takes time in the product of the lengths.
    if len(word) > MAX_NAME_CHARACTERS:
        return None
    names = [choice for choice in itertools.islice(choices, MAX_NAMES) if len(choice) <= MAX_NAME_CHARACTERS]
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return matches[0] if matches else None
