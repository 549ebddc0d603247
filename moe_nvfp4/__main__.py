"""python -m moe_nvfp4: the command line."""

import sys

from moe_nvfp4.cli import main

sys.exit(main())
