"""``python -m astrolabe_lab.cli`` is ``astrolabe``."""

import sys

from astrolabe_lab.cli import main

sys.exit(main())
