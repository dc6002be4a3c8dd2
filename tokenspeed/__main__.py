"""`python -m tokenspeed` is the same as the command `tokenspeed`."""

import sys

from tokenspeed.cli.main import main

sys.exit(main())
