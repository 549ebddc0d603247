"""Does this library compute rightly on this machine? `moe-nvfp4 selftest` runs it; see `run`."""
