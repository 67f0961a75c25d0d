"""Drives an ipykernel the usual way, through jupyter_client, and reports times in milliseconds.

Reads lines from standard input: `run N CODE` executes CODE N times in the live kernel, `start CODE` starts a fresh kernel,
executes CODE once and ends it. Answers each with one JSON list.
"""

import json
import sys
import time

from jupyter_client.manager import start_new_kernel


def once(client, code):
    """One execution: until its reply and until the kernel is idle again."""
    begun = time.perf_counter()
    request = client.execute(code)
    replied = idle = False
    while not replied:
        reply = client.get_shell_msg(timeout=60)
        replied = reply["parent_header"].get("msg_id") == request
    assert reply["content"]["status"] == "ok", reply["content"]
    while not idle:
        message = client.get_iopub_msg(timeout=60)
        idle = (
            message["parent_header"].get("msg_id") == request
            and message["msg_type"] == "status"
            and message["content"]["execution_state"] == "idle"
        )
    return (time.perf_counter() - begun) * 1000


def main():
    manager, client = start_new_kernel(kernel_name="python3")
    for _ in range(50):
        once(client, "1+1")
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, rest = line.strip().partition(" ")
        if what == "run":
            count, _, code = rest.partition(" ")
            print(json.dumps([once(client, code) for _ in range(int(count))]), flush=True)
        elif what == "start":
            begun = time.perf_counter()
            fresh, talk = start_new_kernel(kernel_name="python3")
            once(talk, rest)
            took = (time.perf_counter() - begun) * 1000
            talk.stop_channels()
            fresh.shutdown_kernel(now=True)
            print(json.dumps([took]), flush=True)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


main()
