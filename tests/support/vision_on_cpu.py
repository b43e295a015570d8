"""Prepare the one package that vLLM needs for pictures and that has no build beside a torch of the CPU.

    python tests/support/vision_on_cpu.py UV INTERPRETER DIRECTORY

UV is the installer, INTERPRETER the engine's, and DIRECTORY goes on its PYTHONPATH. The package index has torchvision
for CUDA's torch only. Its transforms, all that is wanted here, are Python; two of its modules describe kernels of the
compiled part, which does not load, and fail the import: they are left out.
"""

import pathlib
import subprocess
import sys

TORCHVISION = "torchvision==0.28.0"  # of the same age as the torch of vLLM 0.32
LEFT_OUT = {"_autograd_registrations,", "_meta_registrations,"}


def prepare(uv: pathlib.Path, interpreter: pathlib.Path, directory: pathlib.Path) -> None:
    """Install torchvision into a directory of its own and take the two imports out of it."""
    where = ["--python", interpreter, "--target", directory]
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", *where, TORCHVISION], check=True)
    start = directory / "torchvision" / "__init__.py"
    lines = start.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.strip() not in LEFT_OUT]
    if len(kept) == len(lines):
        raise SystemExit(f"{start} is not the torchvision that this was written for")
    start.unlink()  # it may be a link into the installer's cache
    start.write_text("".join(kept))


if __name__ == "__main__":
    prepare(*map(pathlib.Path, sys.argv[1:4]))
