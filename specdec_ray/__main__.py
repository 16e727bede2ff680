"""`python -m specdec_ray`."""

import sys

from specdec_ray.cli import main

sys.exit(main())
