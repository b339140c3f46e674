"""Generate tokens with a model that is split over the ranks: tensor parallelism of transformers, on CPUs.

    python examples/serve/make_model.py out/model
    allranks run -n 2 --instead-of-gloo examples/serve/generate.py out/model

transformers itself initializes torch.distributed, with gloo. With ``--backend allranks`` the program does that.
"""

import argparse
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--backend", default="", help="backend of torch.distributed (default: transformers selects it)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a sequence (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="number of prompts (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="generations after the first one (default %(default)s)")
    args = parser.parse_args()

    if args.backend:
        dist.init_process_group(args.backend)
    model = AutoModelForCausalLM.from_pretrained(args.model, distributed_config=DistributedConfig(tp_plan="auto"))
    # The same prompts on every rank. A program with a tokenizer has them from there.
    source = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, model.config.vocab_size, (args.batch, args.prompt), generator=source)
    seconds = []
    for _ in range(1 + args.repeat):
        begin = time.perf_counter()
        found = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, min_new_tokens=args.tokens,
            max_new_tokens=args.tokens, pad_token_id=0,
        )  # fmt: skip
        seconds.append(time.perf_counter() - begin)
    print("tokens", *found[:, args.prompt :].flatten().tolist())
    if dist.get_rank() == 0:
        rates = [args.batch * args.tokens / each for each in seconds[1:]]
        print("tokens/s", *(f"{rate:.1f}" for rate in rates))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
