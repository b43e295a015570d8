"""Thirty workers join that each register as much as they may: how much the gateway grows, and how long clients wait.

Run by hand: `.build/dev/bin/python tests/soak/hostile_registrations.py [one | many]`, for one address or thirty.
"""

import json
import multiprocessing
import os
import pathlib
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time

TOKEN, KEY = secrets.token_hex(8), secrets.token_hex(8)
CONFIG = """
[server_settings]
port = 0
state_directory = "{place}/state"
log_level = "warning"
[logs]
access_log = ""
[security]
join_token_env = "TOKEN"
admin_key_env = "ADMIN"
trusted_proxies = ["127.0.0.1"]
worker_networks = ["10.0.0.0/8"]
[[security.keys]]
name = "client"
key_env = "KEY"
[[external_routes]]
model_name = "good"
api_base = "http://127.0.0.1:{upstream}/v1"
"""
ANSWER = b'{"object": "chat.completion", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'


def serve(listener):
    """Answer every request at once."""
    while True:
        peer, _ = listener.accept()
        if os.fork() == 0:
            while peer.recv(65536):
                peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))
            os._exit(0)


def ask(stream, method, path, body=b"", key=KEY, more=b""):
    """Return the status and the body of the answer."""
    head = b"%b %b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\ncontent-type: application/json\r\n"
    stream.sendall(head % (method, path, key.encode()) + more + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    data = b""
    while b"\r\n\r\n" not in data:
        data += stream.recv(1 << 20)
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"content-length:" in head.lower():
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        while len(rest) < length:
            rest += stream.recv(1 << 20)
    else:
        while not rest.endswith(b"0\r\n\r\n"):
            rest += stream.recv(1 << 20)
    return int(head.split()[1]), rest


def registration(number):
    """Return the registration of a hostile worker, and the address that it comes from."""
    kind, host = number % 3, f"10.0.0.{number + 1}" if "many" in sys.argv else "10.0.0.1"
    count, text = ((2048, 160), (2048, 20), (140, 4000))[kind]
    models = [{"id": f"{number}-{one}-{'x' * (text if kind < 2 else 1)}"} for one in range(count)]
    if kind == 2:
        models = [{**one, "root": "é" + os.urandom(text // 2 - 1).hex()} for one in models]
    told = {"worker_id": f"evil-{number}", "model_name": "evil", "host": host, "port": 9, "models": models}
    told |= {"args": {"a": os.urandom(60_000).hex()}, "start_id": "s"}
    return json.dumps(told).encode(), host


def attack(port, start, done):
    """Register all of them at once, each over its own connection."""
    bodies = [registration(number) for number in range(30)]
    streams = [socket.create_connection(("127.0.0.1", port)) for _ in bodies]
    start.wait()
    for stream, (body, host) in zip(streams, bodies, strict=True):
        head = b"POST /register HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\nx-forwarded-for: %b\r\n"
        stream.sendall(
            head % (TOKEN.encode(), host.encode())
            + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
    statuses = [int(stream.recv(65536).split()[1]) for stream in streams]
    done.put((sum(map(len, (body for body, _ in bodies))), {one: statuses.count(one) for one in set(statuses)}))


def resident_mib(pid):
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def latencies(stream, until):
    found, body = [], b'{"model": "good", "messages": []}'
    while not until(found):
        began = time.perf_counter()
        assert ask(stream, b"POST", b"/v1/chat/completions", body)[0] == 200
        found.append((time.perf_counter() - began) * 1000)
        time.sleep(0.002)
    return found


def shown(found):
    return f"median {statistics.median(found):.1f}, most {max(found):.1f} ms of {len(found)}"


def main():
    listener = socket.create_server(("127.0.0.1", 0))
    upstream = multiprocessing.Process(target=serve, args=(listener,), daemon=True)
    upstream.start()
    with tempfile.TemporaryDirectory() as place:
        config = pathlib.Path(place, "ichat.toml")
        config.write_text(CONFIG.format(place=place, upstream=listener.getsockname()[1]))
        environment = os.environ | {"TOKEN": TOKEN, "KEY": KEY, "ADMIN": secrets.token_hex(8)}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config.write_text(config.read_text().replace("port = 0", f"port = {port}"))
        gateway = subprocess.Popen([sys.executable, "-m", "ichat", "gateway", "-c", config], env=environment)
        try:
            while True:
                try:
                    stream = socket.create_connection(("127.0.0.1", port))
                    break
                except OSError:
                    time.sleep(0.1)
            latencies(stream, lambda found: len(found) == 300)
            before, alone = resident_mib(gateway.pid), latencies(stream, lambda found: len(found) == 500)
            print("alone:", shown(alone))
            start, done = multiprocessing.Event(), multiprocessing.Queue()
            attacker = multiprocessing.Process(target=attack, args=(port, start, done))
            attacker.start()
            time.sleep(3)
            start.set()
            under = latencies(stream, lambda found: not attacker.is_alive() and len(found) > 20)
            sent, statuses = done.get()
            print(f"while 30 register ({sent / 2**20:.1f} MiB, statuses {statuses}):", shown(under))
            print(f"grown by {resident_mib(gateway.pid) - before:.1f} MiB")
            for method, path, body in (
                (b"POST", b"/v1/chat/completions", b'{"model": "nope"}'),
                (b"POST", b"/v1/chat/completions", b'{"model": "nope"}'),
                (b"GET", b"/v1/models", b""),
            ):
                began = time.perf_counter()
                status, answer = ask(stream, method, path, body)
                print(path.decode(), status, len(answer), "bytes", f"{(time.perf_counter() - began) * 1000:.1f} ms")
            print("after:", shown(latencies(stream, lambda found: len(found) == 500)))
            print(f"grown by {resident_mib(gateway.pid) - before:.1f} MiB")
        finally:
            gateway.terminate()
            gateway.wait()
            upstream.terminate()


if __name__ == "__main__":
    main()
