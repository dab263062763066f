"""`python -m tide_gateway` is the command `tide-gateway`."""

import sys

from tide_gateway.cli import main

sys.exit(main())
