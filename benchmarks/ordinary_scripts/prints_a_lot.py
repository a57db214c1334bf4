"""Prints 200,000 lines per rank, some very long, some without an end."""
# corpus: ranks=2

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.zeros(1)
for step in range(200):
    dist.all_reduce(value.add_(1).clone())
    for line in range(1000):
        print(f"step {step} line {line} of rank {rank}: " + "x" * (line % 100))
    sys.stderr.write("." * 2000)
    sys.stderr.flush()
print("y" * 1_000_000)
dist.barrier()
dist.destroy_process_group()
