"""``python -m qcompile.cli``."""

import sys

from qcompile.cli import main

sys.exit(main())
