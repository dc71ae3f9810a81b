"""``python -m qcompile``."""

import sys

from qcompile.cli import main

sys.exit(main())
