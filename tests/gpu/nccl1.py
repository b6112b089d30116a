"""Of vramscope's GPU checks (tests/gpu): NCCL with one rank: init, all_reduce, destroy."""

import os
import tempfile
import time

# A multicast object can put a shared host's GPUs out of service.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist


def main():
    print("PID", os.getpid(), flush=True)
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group(
            "nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
        ones = torch.ones(64 << 20, device="cuda")
        for _ in range(3):
            dist.all_reduce(ones)
        dist.barrier()
        torch.cuda.synchronize()
        print(f"ALLREDUCE {float(ones[0])} {'.'.join(map(str, torch.cuda.nccl.version()))}")
        dist.destroy_process_group()
    print(f"DESTROYED {time.time_ns()}", flush=True)
    time.sleep(1)


main()
