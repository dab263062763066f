"""What the JSON files of a Hugging Face model folder say, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tide_trainer.errors import ConfigurationError


def image_processor(folder: Path) -> dict[str, Any]:
    """The image processor's settings, from either file that transformers writes."""
    if (folder / "processor_config.json").is_file():
        nested = read_json(folder / "processor_config.json").get("image_processor")
        if isinstance(nested, dict):
            return nested
    return read_json(folder / "preprocessor_config.json")


def token_text(folder: Path, token_id: int) -> str:
    """The text of an added token. Raises ValueError where the tokenizer has none of this id."""
    for token in read_json(folder / "tokenizer.json").get("added_tokens") or []:
        if token.get("id") == token_id:
            return str(token["content"])
    raise ValueError(f"tokenizer.json has no added token {token_id}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigurationError where it is missing or something else."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError("model.path", f"{path} is missing; give a whole Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError("model.path", f"{path} cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise ConfigurationError("model.path", f"{path} holds no JSON object")
    return data


def vocab_size(folder: Path) -> int:
    """Ids of the model's vocabulary, as its configuration says. Raises ConfigurationError where it does not."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    if type(size) is not int or size < 1:
        raise ConfigurationError("model.path", f"{folder / 'config.json'} has no vocab_size; give a whole model folder")
    return size
