"""Where a kernel runs: on the card (NVRTC + the driver, as the crate does it) or on the emulated block.

Both have `module(files, defines)` with `launch(name, grid, block, shared_bytes, *arguments)`; an argument is a
torch tensor (its address), an int (32 bits), a float (32 bits), None (null) or a tensor map.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch

import nvrtc

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("KERNEL_CACHE", tempfile.gettempdir() + "/embertune-kernels"))


def _triple(x):
    x = (x,) if isinstance(x, int) else tuple(x)
    return x + (1,) * (3 - len(x))


def _pack(arguments):
    """ctypes values in a list, and the array of their addresses."""
    values = []
    for a in arguments:
        if isinstance(a, torch.Tensor):
            values.append(ctypes.c_void_p(a.data_ptr()))
        elif a is None:
            values.append(ctypes.c_void_p(0))
        elif isinstance(a, int):
            values.append(ctypes.c_int(a))
        elif isinstance(a, float):
            values.append(ctypes.c_float(a))
        else:
            values.append(a)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    return values, pointers


def _aligned_words():
    """128 bytes at a multiple of 64."""
    raw = ctypes.create_string_buffer(192)
    offset = -ctypes.addressof(raw) % 64
    map = (ctypes.c_uint64 * 16).from_buffer(raw, offset)
    map.raw = raw
    return map


class Emulated:
    device = "cpu"
    multiprocessors = 3
    arch = "emulated"

    def __init__(self):
        self.seed = 1

    def module(self, files, defines):
        files = [f for f in files if f not in ("common.cu", "hopper.cu")]
        text = '#include "machine.h"\n' + nvrtc.source(files) + "\n"
        names = re.findall(r"\nKERNEL\s+(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\)", "", text))
        text += "".join(f"EMULATED({name})\n" for name in names)
        CACHE.mkdir(parents=True, exist_ok=True)
        machine = (HERE / "emulate" / "machine.h").read_text()
        stem = hashlib.sha256((machine + text + repr(defines)).encode()).hexdigest()[:16]
        library = CACHE / f"{stem}.so"
        if not library.exists():
            (CACHE / f"{stem}.cpp").write_text(text)
            flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", f"-I{HERE / 'emulate'}"]
            subprocess.run(
                ["g++", *flags, *(f"-D{d}" for d in defines), str(CACHE / f"{stem}.cpp"), "-o", str(library)], check=True
            )
        return EmulatedModule(self, ctypes.CDLL(str(library)))

    def tensor_map(self, tensor, heads, dim, rows):
        """A map of bf16 [tokens, heads, dim] (row stride free), boxes of `rows` tokens × 64 elements."""
        map = _aligned_words()
        map[0] = tensor.data_ptr()
        map[1], map[2], map[3] = dim, heads, tensor.shape[0]
        map[4], map[5] = dim, tensor.stride(0)
        map[6] = 64 | rows << 32
        return map

    def synchronize(self):
        pass


class EmulatedModule:
    def __init__(self, machine, library):
        self.machine, self.library = machine, library

    def launch(self, name, grid, block, shared_bytes, *arguments):
        assert shared_bytes <= 227 * 1024
        values, pointers = _pack(arguments)
        grid, block = ((ctypes.c_uint * 3)(*_triple(x)) for x in (grid, block))
        getattr(self.library, "emulate_" + name)(grid, block, pointers, ctypes.c_uint(self.machine.seed))
        self.machine.seed += 1


def cubin(files, defines, arch):
    """The path of a module's cubin, compiled if it isn't in the cache."""
    text = nvrtc.source(files)
    stem = hashlib.sha256((text + arch + repr(defines)).encode()).hexdigest()[:16]
    path = CACHE / f"{stem}.cubin"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        path.write_bytes(nvrtc.compile(text, arch, defines)[0])
    return path


class Card:
    device = "cuda"

    def __init__(self):
        torch.zeros(1, device="cuda")  # torch's primary context
        self.driver = ctypes.CDLL("libcuda.so.1")
        properties = torch.cuda.get_device_properties(0)
        self.multiprocessors = properties.multi_processor_count
        self.major, self.minor = properties.major, properties.minor
        self.arch = f"sm_{self.major}{self.minor}" + ("a" if self.major >= 9 else "")

    def check(self, status, what):
        if status != 0:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"{what}: {name.value.decode() if name.value else status}")

    def module(self, files, defines, arch=None):
        path = cubin(files, defines, arch or self.arch)
        module = ctypes.c_void_p()
        self.check(self.driver.cuModuleLoadData(ctypes.byref(module), path.read_bytes()), "cuModuleLoadData")
        return CardModule(self, module)

    def tensor_map(self, tensor, heads, dim, rows):
        map = _aligned_words()
        sizes = (ctypes.c_uint64 * 3)(dim, heads, tensor.shape[0])
        strides = (ctypes.c_uint64 * 2)(dim * 2, tensor.stride(0) * 2)
        box = (ctypes.c_uint32 * 3)(64, 1, rows)
        ones = (ctypes.c_uint32 * 3)(1, 1, 1)
        BF16, NO_INTERLEAVE, SWIZZLE_128, L2_256, NO_FILL = 9, 0, 3, 3, 0
        status = self.driver.cuTensorMapEncodeTiled(
            map, BF16, 3, ctypes.c_void_p(tensor.data_ptr()), sizes, strides, box, ones,
            NO_INTERLEAVE, SWIZZLE_128, L2_256, NO_FILL,
        )  # fmt: skip
        self.check(status, "cuTensorMapEncodeTiled")
        return map

    def synchronize(self):
        torch.cuda.synchronize()


class CardModule:
    def __init__(self, card, module):
        self.card, self.module, self.functions = card, module, {}

    def function(self, name, shared_bytes):
        if (name, shared_bytes) not in self.functions:
            f = ctypes.c_void_p()
            self.card.check(self.card.driver.cuModuleGetFunction(ctypes.byref(f), self.module, name.encode()), name)
            MAX_DYNAMIC_SHARED = 8
            status = self.card.driver.cuFuncSetAttribute(f, MAX_DYNAMIC_SHARED, shared_bytes)
            self.card.check(status, f"{shared_bytes} bytes of shared memory for {name}")
            self.functions[name, shared_bytes] = f
        return self.functions[name, shared_bytes]

    def launch(self, name, grid, block, shared_bytes, *arguments):
        values, pointers = _pack(arguments)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        f = self.function(name, shared_bytes)
        status = self.card.driver.cuLaunchKernel(
            f, *_triple(grid), *_triple(block), shared_bytes, stream, pointers, None
        )
        self.card.check(status, f"launch of {name}")
