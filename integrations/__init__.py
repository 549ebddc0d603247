"""Adapters to other libraries; installed as `moe_nvfp4.integrations`."""
