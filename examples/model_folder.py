"""A folder that stands in for a model: scripts/python examples/model_folder.py FOLDER

It has a ``config.json`` and no weights. What makes models here gives them random ones, and scripts
that ask for the name of a model take it: ``--model FOLDER``. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

import torch

from triton_dist.models.llama import KNOWN, LlamaConfig
from triton_dist.models.utils import init_model_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="default: one that is removed at the end")
    parser.add_argument("--model", default="tiny", help=f"whose sizes: {', '.join(KNOWN)}")
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
        with torch.device("meta"):  # no memory for it yet: it is only counted
            model = init_model_cpu(folder, torch.bfloat16)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{folder}: {args.layers} layers of {args.model}, {count:,} parameters")


if __name__ == "__main__":
    main()
