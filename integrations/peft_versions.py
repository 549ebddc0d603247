"""What differs between versions of PEFT. Imports no PEFT."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

OLDEST = Version("0.21")  # whose LoRA runs on 4-bit layers: older ones wrap parameters so that calls of experts raise


def installed() -> Version | None:
    """The version that is installed; a folder of that name is no package."""
    try:
        return Version(version("peft"))
    except PackageNotFoundError:
        return None


def exchanged(peft: str | None, is_transposed: bool) -> bool | None:
    """Whether A has the side of what is out, and B that of what is in, in an adapter of experts that this version of
    PEFT wrote; None: that is not known.

    peft           as in adapter_config.json; None: it is not there, as before 0.18
    is_transposed  the attribute of transformers' class of experts, by which PEFT chooses since 0.19: its parameters are
                   [E, in, out]; other classes' are taken for [E, out, in]

    Source: ParamWrapper.update_layer in peft/tuners/lora/layer.py of 0.18.1, 0.19.0, 0.19.1 and 0.21.2.
    """
    try:
        release = Version((peft or "0.17").partition("@")[0]).release
    except InvalidVersion:
        return None
    return release[:3] in ((0, 19), (0, 19, 0)) if is_transposed else release < (0, 19, 1)


def check_order(name: str, peft: str | None, is_transposed: bool) -> bool:
    """Whether A is known to have the side of what is in. NotImplementedError for an adapter, called `name`, whose A has
    the other; peft and is_transposed as in `exchanged`."""
    found = exchanged(peft, is_transposed)
    if found:
        raise NotImplementedError(OTHER_ORDER.format(name, peft or "before 0.18"))
    return found is False


OTHER_ORDER = (
    "{} was written by PEFT {}, which has what is in and what is out in each other's place: merge it into the dense "
    "model by that PEFT, or train it again. (If a later PEFT has saved it, which keeps the version: write peft_version "
    "0.19.1 into its adapter_config.json)"
)
