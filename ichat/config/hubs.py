"""The hubs of models, and the names of models there."""

import re

Hub = str
"""An element of `HUBS`: the Hugging Face hub or a mirror of it (`HF_ENDPOINT`), or ModelScope."""
HUBS: tuple[Hub, ...] = ("huggingface", "modelscope")
_HUB_NAME = re.compile(r"[\w.-]{1,100}(?:/[\w.-]{1,100})?", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Return whether a text may be the name of a model on a hub, and no path."""
    return _HUB_NAME.fullmatch(text) is not None and not text.startswith((".", "-")) and "/." not in text
