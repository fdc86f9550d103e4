"""`python -m cli` is `baton`."""

import sys

from cli.main import main

sys.exit(main())
