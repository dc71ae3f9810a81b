"""Text that came from a file, on its way to a terminal.

Comes in: any text. Goes out: text that shows what is in it.
Always holds: no control character reaches the terminal, and what was printable stays as it is.
"""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Text with every character escaped that is neither printable nor the end of a line.

    >>> print(visible("a\x1b[31m\tb"))
    a\x1b[31m\tb
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    r"""The same for a name, where an end of line would forge a line of its own.

    >>> print(one_line("blk.0\nblk.1"))
    blk.0\nblk.1
    """
    return visible(text).replace("\n", "\\n")
