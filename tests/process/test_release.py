"""`./build release`: what dist/ holds, from which checkouts it is made, and when it is left alone."""

import base64
import hashlib
import json
import shutil
import sys
import tarfile
import tomllib
import zipfile

import pytest
from support.releases import ROOT, VERSION, commit, make_checkout, release_of_all, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = f"ichat-{VERSION}-py3-none-any.whl"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture(name="place", scope="module")
def place_fixture(tmp_path_factory):
    return release_of_all(tmp_path_factory).parent


def test_a_release_has_every_file_with_its_sum(place, tmp_path):
    """Each file of dist/ is in SHA256SUMS, as sha256sum reads it."""
    dist = place / "dist"
    lines = (dist / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    names = {"ichat.pyz", WHEEL, f"ichat-{VERSION}.tar.gz", f"ichat-{VERSION}.cdx.json", "RELEASE_NOTES.md"}
    assert sums == {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in names}
    assert {path.name for path in dist.iterdir()} == {*names, "SHA256SUMS"}
    assert (dist / "RELEASE_NOTES.md").read_text().startswith(f"# iChat {VERSION}\n\n")
    assert run(sys.executable, dist / "ichat.pyz", "--version", SHIV_ROOT=str(tmp_path)) == f"ichat {VERSION}\n"


def test_wheel_and_source_have_the_package_whole(place):
    """The console's JavaScript and the example are in both, and the wheel has no stray."""
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "ichat").rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    vendor = {f"ichat/console/vendor/{path.name}" for path in (ROOT / ".build/console/vendor").glob("[!.]*")}
    wanted = {*sources, *vendor, "ichat/config/ichat.toml.example"}
    with zipfile.ZipFile(place / "dist" / WHEEL) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == wanted
    with tarfile.open(place / f"dist/ichat-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {*wanted, "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"}


def test_the_bill_of_materials_names_every_package_of_the_pyz(place):
    """Each is there once, in the pinned version; the console's with the hashes that npm knows, and with licences."""
    bill = json.loads((place / f"dist/ichat-{VERSION}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", VERSION)
    packages = dict(one.split("==") for one in PROJECT["dependency-groups"]["pyz"])
    wanted = {f"pkg:pypi/{name}@{version}" for name, version in packages.items()}
    by_name = PROJECT["tool"]["ichat"]["console"]
    console = {f"pkg:npm/{name.replace('@', '%40')}@{one['version']}": one for name, one in by_name.items()}
    found = {one["purl"]: one for one in bill["components"]}
    assert len(found) == len(bill["components"])
    assert found.keys() == wanted | console.keys()
    for purl, package in console.items():
        (digest,) = found[purl]["hashes"]
        assert base64.b64encode(bytes.fromhex(digest["content"])).decode() in package["integrity"]
        assert found[purl]["licenses"]
    root = next(one for one in bill["dependencies"] if one["ref"] == bill["metadata"]["component"]["bom-ref"])
    assert {found[purl]["bom-ref"] for purl in console} < set(root["dependsOn"])
    assert found["pkg:pypi/trio@" + packages["trio"]]["bom-ref"] in root["dependsOn"]
    assert str(place) not in json.dumps(bill)


@pytest.fixture(name="copy")
def copy_fixture(place, tmp_path):
    """Copy the checkout with its dist/, so that it can be changed."""
    return shutil.copytree(place, tmp_path / "copy", symlinks=True)


def test_no_release_of_a_changed_checkout(copy):
    """One sentence names the file, and dist/ is as it was."""
    before = (copy / "dist/SHA256SUMS").read_bytes()
    (copy / "ichat/stray.py").write_text("")
    said = run(sys.executable, copy / "build", "release", code=1)
    (copy / "ichat/stray.py").unlink()
    assert said == (
        "build: a release is made from a commit, and ichat/stray.py differs from it: commit or remove the changes, and"
        " run ./build release again.\n"
    )
    assert (copy / "dist/SHA256SUMS").read_bytes() == before


def test_no_release_without_a_section_in_the_changelog(tmp_path):
    """One sentence says what to rename; nothing is made."""
    place = make_checkout(tmp_path)
    shutil.copy(ROOT / "CHANGELOG.md", place)
    (place / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\nMuch.\n\n## 0.0.9\n\nLittle.\n")
    commit(place)
    said = run(sys.executable, place / "build", "release", code=1)
    assert said.count("\n") == 1
    assert f"no section of version {VERSION}" in said
    assert f"rename `## Unreleased` to `## {VERSION}`" in said
    assert not (place / "dist").exists()


def test_no_release_outside_a_repository(tmp_path):
    """One sentence: the files alone do not say which commit they are."""
    place = make_checkout(tmp_path)
    shutil.rmtree(place / ".git")
    said = run(sys.executable, place / "build", "release", code=1, GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    assert said == "build: a release is made from a commit, and this is no git checkout: clone the repository.\n"


def test_a_release_that_fails_leaves_no_half(copy):
    """What is made goes to dist/ when it is whole: an end before leaves dist/ as it was."""
    before = (copy / "dist/SHA256SUMS").read_bytes()
    project = copy / "pyproject.toml"
    text = project.read_text()
    project.write_text(text.replace('readme = "README.md"', 'readme = "NONE.md"'))
    commit(copy)
    said = run(sys.executable, copy / "build", "release", code=1)
    assert "build: this failed with 1: " in said
    assert (copy / "dist/SHA256SUMS").read_bytes() == before
    project.write_text(text)
    commit(copy)
