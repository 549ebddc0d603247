"""In which order PEFT has the two factors of an adapter of experts: it changed with its versions. Imports no PEFT."""

from __future__ import annotations

from packaging.version import Version


def exchanged(peft: str, is_transposed: bool) -> bool:
    """Whether A has the side of what is out, and B that of what is in, in an adapter that this version of PEFT wrote.

    is_transposed  the attribute of transformers' class of experts, by which PEFT chooses since 0.19: its parameters are
                   [E, in, out]; other classes' are taken for [E, out, in]

    Source: ParamWrapper.update_layer in peft/tuners/lora/layer.py of 0.18.1, 0.19.0, 0.19.1 and 0.21.2.
    """
    release = Version(peft.partition("@")[0]).release
    return release[:3] == (0, 19, 0) if is_transposed else release < (0, 19, 1)
