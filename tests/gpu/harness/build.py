"""Builds the CUDA programs with nvcc, and those in C against the driver, each once."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Program: source, how libcudart is linked, further options.
PROGRAMS = {
    "w1-shared": ("w1.cu", "shared"),
    "w1-static": ("w1.cu", "static"),
    "burst": ("burst.cu", "static"),
    "pairs": ("pairs.cu", "static"),
    "vmm_refs": ("vmm_refs.cu", "static"),
    "measure": ("measure.cu", "static"),
    "sites-static": ("sites.cu", "static", "-g"),
    "sites-shared": ("sites.cu", "shared", "-g"),
    "sites-nodebug": ("sites.cu", "shared"),
}

# Programs of tests/programs, which run on the simulated GPU too: in C, against the driver alone.
DRIVER_PROGRAMS = {
    "every_row": (
        "every_row.c",
        "every_row_memory.c",
        "every_row_contexts.c",
        "every_row_objects.c",
        "every_row_shared.c",
    ),
    "share": ("share.c",),
}


def find_nvcc():
    """Path of nvcc."""
    found = shutil.which("nvcc")
    usual = Path("/usr/local/cuda/bin/nvcc")
    if found or usual.exists():
        return found or str(usual)
    raise FileNotFoundError("there is no nvcc: put CUDA's compiler on the PATH")


def library_paths(nvcc):
    """Linker options that let a program find its shared libcudart at run time."""
    root = Path(os.path.realpath(nvcc)).parent.parent
    folders = [root / "lib64", root / "lib", root / "targets" / "x86_64-linux" / "lib"]
    options = []
    for folder in folders:
        if any(folder.glob("libcudart.so*")):
            options += ["-L", str(folder), "-Xlinker", "-rpath", "-Xlinker", str(folder)]
    return options


class Builder:
    """Builds in the background; `path` waits for one program."""

    def __init__(self, sources, target):
        self.sources, self.target = Path(sources), Path(target)
        self.pool = ThreadPoolExecutor(max_workers=8)
        self.jobs = {}

    def start(self, names):
        """Begins to build."""
        for name in names:
            if name not in self.jobs:
                self.jobs[name] = self.pool.submit(self._build, name)

    def path(self, name):
        """The built program; raises with the compiler's words if it could not be built."""
        self.start([name])
        return self.jobs[name].result(timeout=240)

    def _build(self, name):
        if name in DRIVER_PROGRAMS:
            return self._build_in_c(name)
        source, cudart, *options = PROGRAMS[name]
        self.target.mkdir(parents=True, exist_ok=True)
        nvcc, output = find_nvcc(), self.target / name
        base = [nvcc, "-O2", "-std=c++17", "-cudart", cudart, "-o", str(output)]
        base += [*options, str(self.sources / source)]
        if cudart == "shared":
            base += library_paths(nvcc)
        # The GPU's own instruction set, so that no kernel is compiled at the first launch.
        for extra in (["-arch=native"], ["-arch=sm_90"], []):
            done = subprocess.run(
                base + extra, capture_output=True, text=True, timeout=200, check=False
            )
            if done.returncode == 0:
                return output
        raise RuntimeError(f"nvcc could not build {source}: {done.stderr[-800:]}")

    def _build_in_c(self, name):
        """With cc, against the toolkit's headers and the driver's stub."""
        self.target.mkdir(parents=True, exist_ok=True)
        root, output = Path(os.path.realpath(find_nvcc())).parent.parent, self.target / name
        folders = [root, root / "targets" / "x86_64-linux"]
        command = ["cc", "-std=gnu11", "-O1", "-g", "-o", str(output)]
        for folder in folders:
            command += ["-isystem", str(folder / "include")]
        command += [str(self.sources.parent / "programs" / file) for file in DRIVER_PROGRAMS[name]]
        for folder in folders:
            command += ["-L", str(folder / "lib64" / "stubs"), "-L", str(folder / "lib" / "stubs")]
        # The programs look their functions up: nothing else would have the library loaded.
        command += ["-Wl,--no-as-needed", "-lcuda", "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"cc could not build {name}: {done.stderr[-800:]}")
        return output
