"""NVML's figures: memory in use on a device, and by one process on it."""

import os
import shutil
import subprocess


def _text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


class Nvml:
    """Device 0, through pynvml (package nvidia-ml-py), else through nvidia-smi (MiB only)."""

    def __init__(self):
        try:
            import pynvml

            pynvml.nvmlInit()
            self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.api = pynvml
        except Exception as error:  # any failure of the binding: nvidia-smi says the same in MiB
            if not shutil.which("nvidia-smi"):
                raise RuntimeError(f"neither pynvml ({error}) nor nvidia-smi works here") from error
            self.api = None

    def process_used(self, pid):
        """Bytes that are charged to `pid`; None if it is not listed or NVML does not say."""
        if self.api is None:
            rows = _smi("--query-compute-apps=pid,used_memory", every=True)
            found = [row[1] for row in rows if row[0] == str(pid) and row[1].isdigit()]
            return int(found[0]) << 20 if found else None
        for process in self.api.nvmlDeviceGetComputeRunningProcesses(self.device):
            if process.pid == pid:
                return process.usedGpuMemory
        return None

    def device_used(self):
        """Bytes in use on the device."""
        if self.api is None:
            return int(_smi("--query-gpu=memory.used")[0][0]) << 20
        return self.api.nvmlDeviceGetMemoryInfo(self.device).used

    def count(self):
        """GPUs that a program of this environment may use."""
        if self.api is None:
            there = len(_smi("--query-gpu=index", every=True))
        else:
            there = self.api.nvmlDeviceGetCount()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return there if chosen is None else min(there, len(list(filter(None, chosen.split(",")))))

    def machine(self):
        """Name, driver and memory of the device."""
        if self.api is None:
            name, driver, total = _smi("--query-gpu=name,driver_version,memory.total")[0]
            return {"gpu": name, "driver": driver, "gpu_memory_bytes": int(total) << 20}
        return {
            "gpu": _text(self.api.nvmlDeviceGetName(self.device)),
            "driver": _text(self.api.nvmlSystemGetDriverVersion()),
            "gpu_memory_bytes": self.api.nvmlDeviceGetMemoryInfo(self.device).total,
        }


def _smi(query, every=False):
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if not every:
        command.append("--id=0")
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
