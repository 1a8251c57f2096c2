"""Write a model's ``config.json`` to a folder: scripts/python examples/model_folder.py FOLDER

Scripts with an option ``--model`` accept the folder. It has no weights, so the scripts use random
weights. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

import torch

from triton_dist.models.llama import KNOWN_CONFIGS, LlamaConfig
from triton_dist.models.utils import init_model_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="default: a temporary folder")
    parser.add_argument(
        "--model", default="tiny", help=f"model whose sizes are used: {', '.join(KNOWN_CONFIGS)}"
    )
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vocab_size", type=int, help="default: from the model")
    args = parser.parse_args()
    config = LlamaConfig.of(args.model)
    config = dataclasses.replace(
        config, num_hidden_layers=args.layers, vocab_size=args.vocab_size or config.vocab_size
    )
    with tempfile.TemporaryDirectory() as unnamed:
        folder = args.folder or unnamed
        config.save(folder)
        with torch.device("meta"):  # count parameters without allocating memory
            model = init_model_cpu(folder, torch.bfloat16)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{folder}: {args.layers} layers of {args.model}, {count:,} parameters")


if __name__ == "__main__":
    main()
