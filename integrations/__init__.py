"""Integrations with other libraries; installed as `moe_nvfp4.integrations`."""
