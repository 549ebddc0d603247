"""The process of one group of cases, or of a backend's first check on a device: see `moe_nvfp4.selftest.run`."""

import sys

from moe_nvfp4.selftest.run import child, first

first(sys.argv[2]) if sys.argv[1] == "first" else child(sys.argv[1:])
