"""The process of one group: see `moe_nvfp4.selftest.run`."""

import sys

from moe_nvfp4.selftest.run import child

child(sys.argv[1:])
