"""Images of examples/Containerfile, built with buildah on a base that debootstrap makes, and run without an OCI runtime."""

import json
import os
import shutil
import subprocess

import pytest
from support.programs import LIMIT_S
from support.releases import ROOT, run

NEEDED = ("buildah", "debootstrap", "unshare", "nsenter", "chroot")
USER = 10001
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "STATE_DIRECTORY": "/var/lib/ichat/state",
    "SHIV_ROOT": "/opt/ichat/unpacked",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""What a runtime would give a container of the image; `environment_of` compares it with the image."""
MIRROR = "http://deb.debian.org/debian"
BUILD_S = 600


class Images:
    """The storage of buildah in a directory, and what is built and run from it."""

    def __init__(self, place):
        self.place = place

    def buildah(self, *words, code=0):
        storage = ("--storage-driver", "vfs", "--root", self.place / "storage", "--runroot", self.place / "run")
        done = subprocess.run(
            [str(word) for word in ("buildah", *storage, *words)],
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout.strip()

    def make_base(self):
        """Make the image `localhost/base`: Debian with its Python. Skip where a kernel or the network forbids it."""
        tree = self.place / "base"
        words = ("debootstrap", "--variant=minbase", "--include=python3", "bookworm", tree, MIRROR)
        done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_S, check=False)
        if done.returncode:
            pytest.skip(f"debootstrap cannot make a base here: {done.stdout[-200:]}{done.stderr[-200:]}")
        run("tar", "--directory", tree, "--create", "--file", self.place / "base.tar", ".")
        shutil.rmtree(tree)
        (self.place / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
        self.build("base", self.place, self.place / "Containerfile")
        (self.place / "base.tar").unlink()

    def build(self, name, context, file=ROOT / "examples/Containerfile", *words):
        isolation = ("--isolation", "chroot", "--format", "docker", "--quiet")
        return self.buildah("build", *isolation, "--file", file, *words, "--tag", f"localhost/{name}", context)

    def mounted(self, name):
        """Return the directory with the files of a new container."""
        return self.buildah("mount", self.buildah("from", f"localhost/{name}"))

    def config_of(self, name):
        """Return an image's configuration, as Docker has it."""
        return json.loads(self.buildah("inspect", "--type", "image", f"localhost/{name}"))["Docker"]["config"]


def start_command(tree, volume, config, command):
    """Return what runs a command as the first process of a container: read-only but for a volume, as a user."""
    mounts = [
        "mount --make-rprivate /",
        f"mount --bind {tree} {tree}",
        f"mount --bind {volume} {tree}/var/lib/ichat",
        f"mount --bind {config} {tree}/etc/ichat",
        f"mount --bind /dev {tree}/dev",
        f"mount -t proc proc {tree}/proc",
        f"mount -o remount,ro,bind {tree}",
    ]
    script = " && ".join([*mounts, f"exec {' '.join(inside(tree, command))}"])
    return ["unshare", "--pid", "--fork", "--mount", "--kill-child", "sh", "-c", script]


def inside(tree, command):
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    return ["chroot", f"--userspec={USER}:{USER}", str(tree), "/usr/bin/env", "-i", *variables, *command]


def in_container(pid, tree, *command):
    """Run a command in a container that runs, and return its exit code and what it wrote."""
    words = ["nsenter", "--target", str(pid), "--pid", "--mount", *inside(tree, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stdout + done.stderr


def why_not():
    """Return why no image can be built here; "" if nothing is known to forbid it."""
    if os.geteuid() != 0:
        return "images are built as root here"
    missing = [name for name in NEEDED if not shutil.which(name)]
    return f"needs {', '.join(missing)} (on Debian: apt install buildah debootstrap)" if missing else ""
