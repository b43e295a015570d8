"""Images of examples/Containerfile, built with buildah on a base that debootstrap makes, and run without an OCI runtime."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest
from support.programs import LIMIT_S
from support.releases import ROOT, run

NEEDED = ("buildah", "debootstrap", "unshare", "nsenter", "chroot")
CONTAINERFILE = ROOT / "examples/Containerfile"
TARGETS = {"ichat": "PYTHON", "ichat-vllm": "VLLM", "ichat-sglang": "SGLANG"}
"""The targets of the Containerfile, and the argument that names the base of each."""
PACKAGES = ("python3", "libnuma1", "libgomp1", "g++", "libpython3-dev")
"""Debian's packages of a base: Python, and what the engines' packages need of a system."""
MIRROR = "http://deb.debian.org/debian"
BUILD_S = 900
DRIVERS = {"overlay": ("--storage-opt", "overlay.skip_mount_home=true"), "vfs": ()}
"""The storages that buildah may have, the better first: vfs copies all files of an image for each layer."""


class Images:
    """The storage of buildah in a directory, and what is built and run from it."""

    def __init__(self, place):
        self.place = place
        self._storage = ()
        for driver, options in DRIVERS.items():
            words = ("--storage-driver", driver, *options, "--root", place / driver, "--runroot", place / "run")
            self._storage = tuple(map(str, words))
            if self._try("info").returncode == 0:
                break

    def _try(self, *words):
        command = ["buildah", *self._storage, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)

    def buildah(self, *words):
        done = self._try(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def make_base(self):
        """Make the image `localhost/base`: Debian with its Python. Skip where a kernel or the network forbids it."""
        container = self.buildah("from", "scratch")
        tree = self.buildah("mount", container)
        words = ("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", "bookworm", tree, MIRROR)
        done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_S, check=False)
        if done.returncode:
            pytest.skip(f"debootstrap cannot make a base here: {done.stdout[-200:]}{done.stderr[-200:]}")
        run("chroot", tree, "apt-get", "clean")
        self.commit(container, "base")

    def packages_of(self, engine):
        """Return the packages of .engines/ENGINE, and the place where the base's Python finds them.

        Skip where there are none for its version.
        """
        container = self.buildah("from", "localhost/base")
        tree = self.buildah("mount", container)
        version = run(
            "chroot", tree, "python3", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"
        ).strip()
        self.buildah("rm", container)
        packages = ROOT / f".engines/{engine}/lib/{version}/site-packages"
        if not packages.is_dir():
            pytest.skip(f"there is no {engine} for the base's {version}: `./build engine {engine}` makes one")
        return packages, f"/usr/local/lib/{version}/dist-packages"

    def make_engine_base(self, engine):
        """Make the image `localhost/ENGINE`, the base with an engine's packages, and return its name."""
        packages, place = self.packages_of(engine)
        container = self.buildah("from", "localhost/base")
        self.buildah("copy", "--quiet", container, packages, place)
        self.commit(container, engine)
        return engine

    def commit(self, container, name):
        """Make a container an image, and remove it."""
        self.buildah("commit", "--quiet", "--format", "docker", "--rm", container, f"localhost/{name}")

    def build(self, name, target, context, base="base", *, is_refused=False):
        """Build a target of the Containerfile on a base, or see it refused; return what was said."""
        how = ("--isolation", "chroot", "--format", "docker", "--file", CONTAINERFILE)
        words = ("--build-arg", f"{TARGETS[target]}=localhost/{base}", "--target", target)
        done = self._try("build", *how, *words, "--tag", f"localhost/{name}", context)
        assert (done.returncode != 0) == is_refused, done.stdout + done.stderr
        return done.stdout + done.stderr

    def config_of(self, name):
        """Return an image's configuration, as Docker has it."""
        return json.loads(self.buildah("inspect", "--type", "image", f"localhost/{name}"))["Docker"]["config"]

    def container(self, name, **how):
        """Make a new container of an image; see `Container`."""
        tree = self.buildah("mount", self.buildah("from", f"localhost/{name}"))
        return Container(pathlib.Path(tree), self.config_of(name), **how)

    def remove(self):
        """Remove all containers and images."""
        self.buildah("rm", "--all")
        shutil.rmtree(self.place)


class Container:
    """The files of a container, and the commands that run in it as its image says, on the machine's own network."""

    def __init__(self, tree, config, binds=None, variables=None, *, is_read_only=False):
        """`binds` are directories of the machine, by their places in the container."""
        self.tree = tree
        self.binds = binds or {}
        self.is_read_only = is_read_only
        self._config = config
        said = dict(one.split("=", 1) for one in config.get("Env") or ())
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._variables = {"PATH": path, "HOME": "/", **said, **(variables or {})}
        for name in ("hosts", "resolv.conf"):
            shutil.copyfile(f"/etc/{name}", tree / "etc" / name)
        for target in self.binds:
            (tree / target.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def start_command(self, *words):
        """Return what runs the entry point with these words, or else those of the image, as the first process."""
        command = [*self._config["Entrypoint"], *(words or self._config.get("Cmd") or ())]
        mounts = [
            "mount --make-rprivate /",
            f"mount --bind {self.tree} {self.tree}",
            f"mount --rbind /dev {self.tree}/dev",
            f"mount -t tmpfs shm {self.tree}/dev/shm",
            f"mount -t proc proc {self.tree}/proc",
            f"mount -t sysfs -o ro sysfs {self.tree}/sys",
            *(f"mount --bind {source} {self.tree}{target}" for target, source in self.binds.items()),
        ]
        if self.is_read_only:
            mounts.append(f"mount -o remount,ro,bind {self.tree}")
        script = " && ".join([*mounts, 'exec "$@"'])
        unshare = ("unshare", "--pid", "--fork", "--mount", "--kill-child")
        return [*unshare, "sh", "-c", script, "sh", *self._inside(command)]

    def run(self, pid, *words):
        """Run a command in the container of a process, and return its exit code and what it wrote."""
        command = ["nsenter", "--target", str(pid), "--pid", "--mount", *self._inside(words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return done.returncode, done.stdout + done.stderr

    def _inside(self, words):
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        place = self._config.get("WorkingDir") or "/"
        user = self._config.get("User") or "0:0"
        return ["chroot", f"--userspec={user}", str(self.tree), "env", "-i", f"--chdir={place}", *variables, *words]


def why_not():
    """Return why no image can be built here; "" if nothing is known to forbid it."""
    if os.geteuid() != 0:
        return "images are built as root here"
    missing = [name for name in NEEDED if not shutil.which(name)]
    return f"needs {', '.join(missing)} (on Debian: apt install buildah debootstrap)" if missing else ""
