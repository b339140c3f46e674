"""Train a small GPT on generated text, data-parallel; the training survives the death of its ranks.

    allranks run -n 2 examples/gpt/train.py
    allranks run -n 3 --elastic 2 examples/gpt/train.py                  # a dead rank is replaced
    allranks run -n 2 --restarts 3 examples/gpt/train.py --checkpoints out/gpt

The text is sums ("17+25=42"), so that the result can be checked: the model must continue sums that are not in its
training data.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import allranks as dist

ALPHABET = "0123456789+=\n"
LENGTH = 9  # "17+25=042"


def sums(numbers):
    """Return rows of text as numbers. The digits of the sum are reversed, as in addition on paper."""
    lines = [f"{n // 100:02}+{n % 100:02}={str(n // 100 + n % 100).zfill(3)[::-1]}" for n in numbers.tolist()]
    return torch.tensor([[ALPHABET.index(letter) for letter in line] for line in lines])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))

    def forward(self, text):
        return self.head(self.blocks(self.letters(text) + self.places.weight[: text.shape[1]]))


@torch.no_grad()
def right(model, numbers):
    """Return the share of sums that the model continues correctly."""
    text = sums(numbers)
    known = text[:, :6].clone()
    while known.shape[1] < LENGTH:
        known = torch.cat([known, model(known)[:, -1:].argmax(-1)], 1)
    return (known == text).all(1).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=128, help="total batch size of all ranks")
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", help="write checkpoints to this folder, and continue from the newest one"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group()
    torch.manual_seed(0)
    order = torch.randperm(10_000)
    seen, unseen = order[:9_500], order[9_500:]
    model = GPT()
    forward = dist.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    kept = dist.resilience.Checkpoints(args.checkpoints, every=100) if args.checkpoints else None
    state = dist.resilience.State(model=model, optimizer=optimizer, schedule=schedule, checkpoints=kept)
    for step in state.steps(args.steps):
        with step:
            chosen = torch.randint(len(seen), (args.batch_size,), generator=torch.Generator().manual_seed(step.index))
            text = sums(seen[chosen[dist.get_rank() :: dist.get_world_size()]])
            logits = forward(text[:, :-1])
            # Only the text after "=" can be predicted.
            loss = F.cross_entropy(logits[:, 5:].flatten(0, 1), text[:, 6:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if dist.get_rank() == 0 and (step.index + 1) % 100 == 0:
            print(f"step {step.index + 1}: loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(f"continues {right(model.eval(), unseen[:500]):.0%} of unseen sums correctly")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
