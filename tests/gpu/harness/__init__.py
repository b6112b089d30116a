"""What the GPU checks share: programs, builds, logs, NVML, ELF files, results."""
