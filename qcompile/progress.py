"""How far a long step is.

Comes in: a callable, or the word ``bar``. Goes out: a callable that is told of every weight.
Always holds: nothing is printed unless it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from qcompile.errors import OptionError
from qcompile.session import Progress

Reporting = Progress | Literal["bar"]


def reporter(progress: object) -> Progress:
    """The callable that ``progress`` means.

    Raises:
        OptionError: it is neither a callable nor ``bar``.
    """
    if callable(progress):
        return progress
    if progress == "bar":
        return Bar()
    raise OptionError(
        f"progress={progress!r}",
        f"a {type(progress).__name__}",
        "a callable (name, bytes done, bytes in all), or 'bar'",
        "pass progress='bar'",
    )


@dataclass
class Bar:
    """A tqdm bar on stderr for every step, made on the step's first report."""

    bar: Any = None

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are done and ``name`` is next."""
        from tqdm import tqdm

        if self.bar is None:
            self.bar = tqdm(total=total, unit="B", unit_scale=True, desc="weights")
        self.bar.set_postfix_str(name, refresh=False)
        self.bar.update(done - self.bar.n)
        if done == total:
            self.bar.close()
            self.bar = None
