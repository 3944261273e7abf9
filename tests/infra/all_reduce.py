"""A part of a group: sums its rank over all machines, or waits to be killed."""

import sys
import time

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {value.item():.0f}", flush=True)
    if len(sys.argv) > 1 and "wait" in sys.argv[1]:
        time.sleep(600)
    dist.destroy_process_group()
