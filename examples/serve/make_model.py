"""Write a small Llama with random weights into a folder, because a real model would need a download.

python examples/serve/make_model.py out/model
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--hidden", type=int, default=256, help="size of a hidden state (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="default %(default)s")
    parser.add_argument("--vocabulary", type=int, default=1024, help="number of tokens (default %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        # Larger than for a training, so that the tokens differ: an untrained model would repeat one.
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
