"""`python -m service`: the same as `strata`."""

import sys

from service.cli import main

sys.exit(main())
