"""Describes the machine: its name and versions, its peak FLOP/s, and the process's peak memory."""
import math
import os
import platform
import re
import subprocess
import sys
import timeit

import torch

# dense bfloat16 / float16 peaks in FLOP/s, from the vendors' data sheets
PEAK_FLOPS = {
    "GB200": 2.5e15, "B200": 2.25e15, "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12,
    "H100 NVL": 835e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "A10G": 70e12, "A40": 150e12, "L40S": 362e12,
    "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
    "MI300X": 1307e12, "MI250X": 191.5e12}  # half of an MI250X: torch sees two devices


def peak_flops(device, dtype):
    """FLOP/s of one device, for MFU: from its data sheet if PEAK_FLOPS has it, else of a matmul measured here."""
    if device.type == "cuda" and dtype != "float32":
        found = re.search(rf"\b({'|'.join(PEAK_FLOPS)})\b(?! (Ti|D|Laptop)\b)", torch.cuda.get_device_name(device))
        if found:
            return PEAK_FLOPS[found[1]]
    n = 4096 if device.type != "cpu" else 256 if dtype == "float16" else 1024  # float16 is slow on a CPU
    a = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    seconds = min(timeit.repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=8))  # item waits for the device
    return 2 * n ** 3 / seconds


def peak_memory_mb(device):
    """Peak memory of this process in MiB: allocated on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 10 if sys.platform != "darwin" else 2 ** 20)


def describe_machine(device):
    """Where a run takes place, as a dict of plain values: device, CPU threads, torch, commit of the scripts."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif os.path.exists("/proc/cpuinfo"):
        name = re.search(r"model name\s*: (.*)|$", open("/proc/cpuinfo").read())[1] or platform.machine()
    else:
        name = platform.processor()
    folder = os.path.dirname(os.path.abspath(__file__))
    code, commit = subprocess.getstatusoutput(f'git -C "{folder}" describe --always --dirty --exclude="*"')
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
            "commit": commit if code == 0 else None}
