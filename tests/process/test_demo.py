"""`./build`, as a newcomer types it: the demonstration with a fake engine, and Ctrl-C while something is made."""

import contextlib
import importlib.machinery
import importlib.util
import signal
import sys

import psutil
import pytest
from support.deployments import free_port
from support.programs import ROOT


@pytest.fixture(name="build")
def build_fixture(tmp_path, monkeypatch):
    """The script as a module, which makes what it makes in another directory."""
    handler = signal.getsignal(signal.SIGTERM)
    loader = importlib.machinery.SourceFileLoader("build_script", str(ROOT / "build"))
    build = importlib.util.module_from_spec(importlib.util.spec_from_loader("build_script", loader))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(build)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/fake_engine"))
    yield build
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_demonstration_ends_with_what_to_open_and_to_type(build, tmp_path, capfd, is_ours):
    """An answer, the console's link, `chat` and `top`, and a larger model where a small one answered; nothing is left."""
    (tmp_path / "model").mkdir()
    port = free_port()

    class FakeDemo(build.Demo):
        def configure(self):
            path = super().configure()
            lines = [line for line in path.read_text().splitlines() if not line.startswith(("max_", "enforce_"))]
            path.write_text("\n".join(lines).replace("model_path", 'backend = "fake"\nmodel_path'))
            return path

    FakeDemo(sys.executable, str(tmp_path / "model"), is_ours=is_ours, port=port).run(once=True)
    out = capfd.readouterr().out
    name = "tiny" if is_ours else "model"
    before, _, after = out.partition("\nOpen ")
    assert "0 1 2" in before
    assert after.startswith(f"http://127.0.0.1:{port}/console/#key=")
    assert f"./ichat.pyz chat {name} --gateway http://127.0.0.1:{port}\n" in after
    assert f"./ichat.pyz top --gateway http://127.0.0.1:{port}\n" in after
    assert ("./build demo --model Qwen/Qwen3-0.6B" in after) is is_ours
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            left += [process.pid] if any(str(tmp_path) in word for word in process.cmdline()) else []
    assert left == []


def test_ctrl_c_shows_no_traceback(build, monkeypatch):
    """It ends the script with the usual exit code, whatever is being made."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "demo", interrupted)
    monkeypatch.setattr(sys, "argv", ["build", "demo"])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        build.main()
    assert ended.value.code == 130
