"""`python -m service`: the same as `strata`."""

import sys

from service.cli.main import main

sys.exit(main())
