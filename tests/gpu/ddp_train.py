"""Of vramscope's GPU checks (tests/gpu): two ranks train a small GPT-like model with DDP.

Started by torchrun. ddp_train.py [--steps N] [--every N] [--leak-rank R] [--stray WHAT --file PATH]

With --every it says after every so many steps what PyTorch holds, and pauses, so that a reader who
polls has seen it. --leak-rank makes that rank keep a tensor a step. With --stray rank 1 touches
GPU 0:

  model       torch.load of the weights that rank 0 saved, without map_location
  everything  the same with the optimizer's state, several times as large
  tensor      one small tensor there

Each rank prints, as a word and JSON: RANK (who it is), LEAK and STRAY (the line), STEP, DESTROYED.
"""

import argparse
import os
import time

# A multicast object can put a shared host's GPUs out of service.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from gpt_train import Trainer, leaking_line
from marks import marked, say
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 5
PAUSE_S = 0.55
STRAY_RANK = 1


def introduce(rank):
    """Who this rank is, by its own word."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    say(
        "RANK",
        rank=rank,
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=dist.get_world_size(),
        pid=os.getpid(),
        uuid=f"GPU-{device.uuid}",
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )


def make_trainer(rank, leak_rank):
    trainer = Trainer("launch", "list" if rank == leak_rank else "none")
    trainer.model = DistributedDataParallel(trainer.model, device_ids=[torch.cuda.current_device()])
    for _ in range(WARM_UP):
        trainer.step()
    torch.cuda.synchronize()
    return trainer


def save(trainer, what, path):
    state = {"model": trainer.model.module.state_dict()}
    if what == "everything":
        state["optimizer"] = trainer.optimizer.state_dict()
    torch.save(state, path)


def restore(trainer, path):
    state = torch.load(path)  # here
    trainer.model.module.load_state_dict(state["model"])
    return torch.cuda.memory_reserved(0)


def touch():
    torch.zeros(1, device="cuda:0")  # here
    return torch.cuda.memory_reserved(0)


def stray(trainer, rank, what, path):
    """Rank 1 gets a context on GPU 0, while it works on GPU 1."""
    if what in ("model", "everything"):
        if rank == 0:
            save(trainer, what, path)
        dist.barrier()
    if rank == STRAY_RANK:
        reserved = touch() if what == "tensor" else restore(trainer, path)
        function = touch if what == "tensor" else restore
        say("STRAY", rank=rank, site=f"{marked(function)} {function.__name__}", reserved=reserved)
    dist.barrier()


def totals(rank, step):
    """What PyTorch holds on this rank's GPU, and nothing happens until it was seen."""
    torch.cuda.synchronize()
    segments = [[s["address"], s["total_size"]] for s in torch.cuda.memory_snapshot()]
    say(
        "STEP",
        rank=rank,
        step=step,
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        max_allocated=torch.cuda.max_memory_allocated(),
        max_reserved=torch.cuda.max_memory_reserved(),
        segments=segments,
        ns=time.time_ns(),
    )
    time.sleep(PAUSE_S)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--leak-rank", type=int)
    parser.add_argument("--stray", choices=["model", "everything", "tensor"])
    parser.add_argument("--file")
    arguments = parser.parse_args()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    introduce(rank)
    trainer = make_trainer(rank, arguments.leak_rank)
    if rank == arguments.leak_rank:
        say("LEAK", rank=rank, line=f"gpt_train.py:{leaking_line()}")
    if arguments.stray:
        stray(trainer, rank, arguments.stray, arguments.file)
    for step in range(arguments.steps):
        trainer.step()
        if arguments.every and step % arguments.every == arguments.every - 1:
            totals(rank, step)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    say("DESTROYED", rank=rank, ns=time.time_ns())
    time.sleep(1)


main()
