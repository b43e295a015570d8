"""A stand-in for the driver of NVIDIA's GPUs."""

import os
import types

GIB = 1024**3


class NVMLError(Exception):
    """As nvidia-ml-py's: a code, and a text for it."""

    TEXTS = {3: "Not Supported", 4: "Insufficient Permissions", 9: "Driver Not Loaded", 15: "GPU is lost"}

    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return self.TEXTS[self.value]


class NVMLLibraryMismatchError(Exception):
    """As nvidia-ml-py's, which is no NVMLError: the driver is older than the module."""


class Nvml(types.ModuleType):
    """A stand-in for the module pynvml: some GPUs of 80 GiB, and what each call shall do instead."""

    def __init__(self, buses=(1,), instead=None):
        super().__init__("pynvml")
        self.NVMLError, self.NVMLLibraryMismatchError = NVMLError, NVMLLibraryMismatchError
        self.buses = buses
        self.instead = dict(instead or {})
        self.inits = self.shutdowns = 0

    def __getattr__(self, name):
        if not name.startswith("nvml") or name.endswith("_v2"):
            raise AttributeError(name)
        return lambda *args: self.call(name, *args)

    def call(self, name, *args):
        step = self.instead.get((name, *args), self.instead.get(name))
        if isinstance(step, Exception):
            raise step
        if callable(step):
            return step()
        if step is not None:
            return step
        bus = self.buses[args[0]] if args and name != "nvmlDeviceGetHandleByIndex" else None
        match name:
            case "nvmlInit":
                self.inits += 1
            case "nvmlShutdown":
                self.shutdowns += 1
            case "nvmlDeviceGetCount":
                return len(self.buses)
            case "nvmlDeviceGetHandleByIndex":
                return args[0]
            case "nvmlDeviceGetPciInfo":
                return types.SimpleNamespace(domain=0xFFFF, bus=bus, device=0)
            case "nvmlDeviceGetMemoryInfo":
                return types.SimpleNamespace(total=80 * GIB, used=30 * GIB, free=50 * GIB)
            case "nvmlDeviceGetUtilizationRates":
                return types.SimpleNamespace(gpu=75, memory=10)
            case "nvmlDeviceGetMigMode":
                raise NVMLError(3)
            case "nvmlDeviceGetUUID":
                return f"GPU-{bus}"
            case "nvmlDeviceGetName":
                return "NVIDIA H100"
            case "nvmlDeviceGetComputeRunningProcesses":
                return [types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=30 * GIB)]
            case "nvmlDeviceGetGraphicsRunningProcesses" | "nvmlDeviceGetMPSComputeRunningProcesses":
                return []
        return None
