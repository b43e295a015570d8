// The forms: a worker that is launched here, and a worker that joins from elsewhere.

import assert from "node:assert/strict";
import { test } from "node:test";
import { argumentValue, bodyOf, EMPTY, nameOf, tomlOf } from "console/pages/launch/draft.js";
import { addressOf, interpreterOf, joinCommand, joinSettings } from "console/pages/welcome/join.js";

test("a model's name is its directory's, or that of the hub", () => {
  assert.equal(nameOf({ model_name: " ", model_path: "/models/qwen3/ " }), "qwen3");
  assert.equal(nameOf({ model_name: "", model_path: "Qwen/Qwen3-0.6B" }), "Qwen/Qwen3-0.6B");
  assert.equal(nameOf({ model_name: "mine", model_path: "/m" }), "mine");
});

test("an empty form is the path and the engine; what is set is of its kind", () => {
  const body = { model_name: "m", model_path: "/m", backend: "vllm" };
  assert.deepEqual(bodyOf({ ...EMPTY, model_path: "/m" }, new Map()), body);
  const flags = new Map([
    ["dtype", { name: "--dtype", kind: "text" }],
    ["stop", { name: "--stop", kind: "text", is_list: true }],
  ]);
  const args = { dtype: "true", stop: "a\n\nb", tensor_parallel_size: "2", enforce_eager: "true", empty: " " };
  const draft = { ...EMPTY, model_path: "/m", gpu_ids: [], load: "on_demand", idle_s: "1.5", env: "A=b=c\n\n", args };
  assert.deepEqual(bodyOf(draft, flags), {
    ...body,
    gpu_ids: [],
    idle_s: 1.5,
    load: "on_demand",
    env: { A: "b=c" },
    dtype: "true",
    stop: ["a", "b"],
    tensor_parallel_size: 2,
    enforce_eager: true,
  });
});

test("what cannot be read is named", () => {
  assert.throws(() => argumentValue("{", { name: "--override", kind: "json" }), /^Error: --override takes JSON: /);
  assert.throws(() => bodyOf({ ...EMPTY, env: "=x" }, new Map()), /A variable is NAME=value, and this is not: =x/);
});

test("a worker as a table of TOML", () => {
  const body = { model_name: 'a"b', gpu_ids: [0, 1], env: { A: "\u007f" }, "odd key": {}, on: true };
  assert.equal(
    tomlOf(body),
    '[[managed_workers]]\nmodel_name = "a\\"b"\ngpu_ids = [0, 1]\nenv = { A = "\\u007f" }\n"odd key" = {}\non = true',
  );
});

test("only what the configuration lacks is named", () => {
  const lacks = (host, token) =>
    joinSettings({ server_settings: { host }, security: { join_token_env: token } })?.toml.split("\n")[0] ?? null;
  assert.equal(lacks("127.0.0.1", null), "[server_settings]");
  assert.equal(lacks("127.0.0.1", "T"), "[server_settings]");
  assert.equal(lacks("0.0.0.0", null), "[security]");
  assert.equal(lacks("0.0.0.0", "T"), null);
});

test("the address is the one that other machines reach", () => {
  const address = (host, base) => addressOf({ server_settings: { host } }, { name: "gpu-1" }, base);
  assert.equal(address("0.0.0.0", "http://127.0.0.1:4000"), "http://gpu-1:4000");
  assert.equal(address("10.0.0.4", "https://localhost:4000"), "https://10.0.0.4:4000");
  assert.equal(address("::", "http://[::1]:4000"), "http://gpu-1:4000");
  assert.equal(address("fd00::4", "http://127.0.0.1:4000"), "http://[fd00::4]:4000");
  assert.equal(address("127.0.0.1", "https://gw.example/ichat"), "https://gw.example/ichat");
});

test("a shell reads the command as it is meant", () => {
  const command = joinCommand({ name: "vllm" }, "/a b/python", "it's", "http://h");
  assert.match(command, /'\/a b\/python' ichat\.pyz worker -be vllm \\\n {2}--model 'it'\\''s' \\\n/);
});

test("an interpreter is named where it is known to have the engine, or is configured", () => {
  const of = (version, engines) => {
    const engine = { name: "vllm", python: "/p/python", version };
    return joinCommand(engine, interpreterOf(engine, { engines }), "m", "http://gw:4000").split(" ")[1];
  };
  assert.deepEqual([of("0.32.0", {}), of(null, { vllm: {} }), of(null, {})], ["/p/python", "/p/python", "PYTHON"]);
});
