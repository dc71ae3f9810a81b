"""The errors a user can meet.

Comes in: the four parts of a failure. Goes out: one exception with one readable message.
Always holds: the message says where it happened, what was found, what was needed and what to do,
and the class says which stage refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QCompileError(Exception):
    """Base of every error that qcompile raises on purpose.

    Args:
        where: the place: a file, a module path, a graph node, an option.
        found: what is there.
        needed: what had to be there.
        fix: what the user can do about it.
        reasons: further lines, for instance each kernel's refusal.
    """

    def __init__(
        self, where: str, found: str, needed: str, fix: str, *, reasons: Iterable[str] = ()
    ) -> None:
        self.where = where
        self.found = found
        self.needed = needed
        self.fix = fix
        self.reasons = tuple(reasons)
        lines = [f"{where}: {found}"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  needed  {needed}", f"  fix     {fix}"]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # The default would call the class with the joined message alone.
        return _rebuild, (type(self), self.where, self.found, self.needed, self.fix, self.reasons)


def _rebuild(
    cls: type[QCompileError],
    where: str,
    found: str,
    needed: str,
    fix: str,
    reasons: tuple[str, ...],
) -> QCompileError:
    return cls(where, found, needed, fix, reasons=reasons)


class OptionError(QCompileError, ValueError):
    """An argument, option or environment setting has no meaning here."""


class CaptureError(QCompileError):
    """The model could not be turned into a graph whose weights have names."""


class SchemeError(QCompileError):
    """A checkpoint is damaged, unknown, or does not fit the model."""


class LayoutError(QCompileError):
    """Bytes do not have the layout they claim, or no edge leads to the wanted one."""


class PlanError(QCompileError):
    """No kernel accepts a site and the policy does not allow anything else."""


class LowerError(QCompileError):
    """A canonical op was left in a graph that should have been lowered."""


class VerifyError(QCompileError):
    """A compiled site disagrees with the reference by more than its kernel declares."""


class ArtifactError(QCompileError):
    """A saved compilation is incomplete, damaged, or made for another machine or release."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint for a mistyped word: ``"did you mean 'gguf'?"``, or the empty string."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
