"""The flags of the real engines, as the launch form gets them: by their own interpreters, over a real gateway."""

import sys

import pytest
from support.programs import Program
from support.real_engines import ENGINES, LOAD_S, PYZ, python_of


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gateway_lists_an_engines_flags(engine, tmp_path):
    """Each has its kind, choices, default and the engine's own help; the worker's own are not among them."""
    config = tmp_path / "ichat.toml"
    config.write_text(
        f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}/state"\n[timeouts]\nengine_flags_s = {LOAD_S}\n'
        f'[engines.{engine}]\npython = "{python_of(engine)}"\n'
    )
    program = Program([sys.executable, PYZ, "gateway", "-c", str(config)], tmp_path / "log").wait_for_port()
    try:
        found = {one["name"]: one for one in program.get("/v1/admin/engines")[1]["engines"]}
        assert found[engine]["version"][0].isdigit()
        status, answer = program.ask_by("GET", f"/v1/admin/engines/{engine}/flags", timeout=LOAD_S)
        again = program.get(f"/v1/admin/engines/{engine}/flags")
    finally:
        program.end()
    assert (status, answer["python"]) == (200, str(python_of(engine)))
    assert again == (status, answer)
    flags = {flag["key"]: flag for flag in answer["flags"]}
    assert len(flags) == len(answer["flags"]) > 250
    assert not flags.keys() & {"model", "model_path", "host", "port", "served_model_name", "ssl_keyfile", "help"}
    assert all(flag["help"] for flag in flags.values())
    length, share = {
        "vllm": ("max_model_len", "gpu_memory_utilization"),
        "sglang": ("context_length", "mem_fraction_static"),
    }[engine]
    assert (flags[length]["kind"], flags[share]["kind"]) == ("integer", "number")
    assert "context" in flags[length]["help"]
    assert {"auto", "fp8_e5m2"} <= {*flags["kv_cache_dtype"]["choices"]}
    assert flags["trust_remote_code"]["kind"] == "switch"
    assert flags["speculative_config" if engine == "vllm" else "model_loader_extra_config"]["kind"] in ("json", "text")
