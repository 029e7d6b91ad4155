"""`python -m anydevice`: the same as the command `anydevice`."""

from __future__ import annotations

import sys

from anydevice.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
