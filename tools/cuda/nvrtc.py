"""CUDA C++ to a cubin through NVRTC, as the crate compiles its kernels: sources glued together, no headers.

As a program: `python nvrtc.py sm_90a common.cu,hopper.cu,attention_work.cu,attention_sm90.cu HEAD_DIM=128 [out.cubin]`
prints the assembler's resource report. NVRTC is looked for in $NVRTC, then where the loader finds it.
"""

import ctypes
import os
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "ops" / "cuda"


def _library():
    names = [os.environ.get("NVRTC"), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for directory in sys.path:  # PyPI's wheels
        names += sorted(str(p) for p in Path(directory or ".").glob("nvidia/*/lib/libnvrtc.so.1*"))
    for name in filter(None, names):
        try:
            if os.path.isabs(name):
                for builtins in Path(name).parent.glob("libnvrtc-builtins.so*"):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise SystemExit("libnvrtc isn't there: set NVRTC to its path")


def source(files):
    return "\n".join((SOURCES / name).read_text() for name in files)


def compile(text, arch, defines=(), options=()):
    """The cubin and the log."""
    lib = _library()
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
    flags = [f"--gpu-architecture={arch}", "--std=c++17", *options, *(f"-D{d}" for d in defines)]
    array = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    status = lib.nvrtcCompileProgram(program, len(flags), array)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    log = log.value.decode()
    if status != 0:
        raise RuntimeError(log)
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, cubin)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, log


if __name__ == "__main__":
    arch, files, *rest = sys.argv[1:]
    out = [r for r in rest if r.endswith(".cubin")]
    cubin, log = compile(source(files.split(",")), arch, [r for r in rest if r not in out], ["--ptxas-options=-v"])
    print("\n".join(line for line in log.splitlines() if line.strip() and "Compiling" not in line))
    for name in out:
        Path(name).write_bytes(cubin)
