"""What a model's config says about its results, to find where two models differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Keys of configs that say nothing about what a model computes from token ids
TRANSIENT = re.compile(
    r"_.*|transformers_version|(torch_)?dtype|name_or_path|quantization_config|architectures|use_cache|\w+_token_ids?|"
    r"output_\w+|return_dict|problem_type|id2label|label2id|initializer_\w+|\w*(dropout|aux_loss\w*|loss_coef)|"
    r"is_(encoder_)?decoder|chunk_size_feed_forward"
)


def language_config(config: Any) -> Any:
    """The part of a transformers `config` that is about the language model: of a decision model, the part of its
    body's config. ValueError if there are several."""
    text = config.get_text_config()
    return text if text is config or isinstance(text, dict) else language_config(text)


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer, where transformers has values that differ by layer (Gemma 4, Dots3 Note), and reading
    them of `config` is an error; else an empty list."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else []


def settings(config: Any) -> dict[str, Any]:
    """The settings in a transformers `config` that say what the language model computes, defaults included."""

    def kept(part: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if not TRANSIENT.fullmatch(key)}

    try:
        text = language_config(config)
    except ValueError:  # it has several
        text = config
    # A plain mapping where the model's class knows no such part
    written = json.dumps(text) if isinstance(text, dict) else text.to_json_string(use_diff=False)
    found: dict[str, Any] = json.loads(written, object_hook=kept)
    return found


def different(one: Mapping[str, Any], other: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key that both have with different values, and the values. Keys that only one has are defaults of
    another version of transformers."""
    for key in one.keys() & other.keys():
        was, now = one[key], other[key]
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from different(was, now, f"{above}{key}.")
        elif was != now:
            yield f"{above}{key}", was, now


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """'key 3 (there 2), ...': the first five settings in which `mine` differs from `theirs`; "" if there are none."""
    found = sorted(f"{key} {now!r} (there {was!r})" for key, now, was in different(mine, theirs))
    return ", ".join(found[:5]) + ", ..." * (len(found) > 5)
