"""A takeover with real processes: requests wait and are answered, streams go on, and one process has the gateway."""

import http.client
import json
import os
import pathlib
import signal
import socket
import ssl
import struct
import threading
import time

import psutil
import pytest
from support.deployments import free_port, worker
from support.programs import ichat

LOGS = '[logs]\naccess_log = ""\n'
KEEP = 'on_gateway_exit = "keep"\nlog_streaming = true'


class Load:
    """Short requests on kept and on fresh connections, and streams, until it is told to end."""

    def __init__(self, port, context=None):
        self.port, self.context = port, context
        self.failures, self.answered = [], 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask_forever, args=(kept,)) for kept in (True, False)]
        for thread in self._threads:
            thread.start()

    def connect(self):
        if self.context is not None:
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.context)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def _ask_forever(self, is_kept):
        connection = self.connect()
        while not self._end.is_set():
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
            try:
                connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    self.failures.append((answer.status, text))
                self.answered += 1
                if answer.getheader("connection") == "close" or not is_kept:
                    connection.close()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                self.failures.append(error)
                connection.close()
                connection = self.connect()
        connection.close()

    def end(self):
        self._end.set()
        for thread in self._threads:
            thread.join()
        return self.failures


def begin_takeover(start, tmp_path, *flags):
    return start(ichat("gateway", "-c", str(tmp_path / "ichat.toml"), "--takeover", *flags))


def test_requests_are_answered_while_another_process_gets_the_gateway(gateway, start, tmp_path):
    """No request is refused, the worker stays, and the old process ends."""
    port = free_port()
    old = gateway(worker("m", KEEP) + LOGS, port=port)
    old.wait_until_ready("m-0")
    pid = old.get("/v1/admin/workers/m-0")[1]["pid"]
    load = Load(port)
    old.until(lambda: load.answered > 20)
    new = begin_takeover(start, tmp_path)
    new.wait_for_port()
    before = load.answered
    new.until(lambda: load.answered > before + 50)
    old.process.wait(60)
    failures = load.end()
    assert failures == []
    assert old.process.returncode == 0
    assert new.get("/v1/admin/workers/m-0")[1]["pid"] == pid
    assert new.state("m-0") == "ready"
