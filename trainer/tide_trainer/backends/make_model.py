"""Makes the tiny model of a run in a process of its own, so that the main process never imports torch.

    python -m tide_trainer.backends.make_model --settings FILE

The file is JSON: {"directory": ..., "words": "module:function", "shape": {fields of TinyModel}, "fake": bool}. With
`fake` the weights are those of the fake engine and backend; tokenizer and chat template are the same.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from tide_trainer.backends.fake_training import make_fake_model
from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model
from tide_trainer.errors import TrainerError


def main() -> int:
    """Writes the model folder; exit code 1 says on stderr what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, type=Path)
    settings = json.loads(parser.parse_args().settings.read_text(encoding="utf-8"))
    module, _, name = settings["words"].partition(":")
    words = list(getattr(importlib.import_module(module), name)())
    try:
        folder = make_tiny_model(settings["directory"], words, TinyModel(**settings["shape"]))
        if settings["fake"]:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
            make_fake_model(folder, vocabulary, settings["shape"]["seed"])
    except TrainerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
