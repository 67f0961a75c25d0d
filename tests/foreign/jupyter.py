"""Jupyter's own test suite for kernels, nbclient and jupyter_client on `ryokan jupyter`."""
import json
import os
import signal
import subprocess
import sys
import time
import unittest

import jupyter_kernel_test
import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

RYOKAN = sys.argv.pop(1)
DATA = os.environ["JUPYTER_DATA_DIR"]


def ryokan(*args):
    return subprocess.run([RYOKAN, *args], check=True, capture_output=True, text=True).stdout


def kernels():
    return ryokan("ls", "--quiet").split()


def setUpModule():
    for args in (["--engine", "python"], ["--engine", "bash"], ["--kernel", "demo", "--html"]):
        ryokan("jupyter", "install", *args)


def tearDownModule():
    removed = json.loads(ryokan("jupyter", "uninstall", "--json"))["removed"]
    assert len(removed) == 3 and not any(os.path.exists(path) for path in removed), removed


# The suite allows 15 s for an answer.
jupyter_kernel_test.TIMEOUT = 180


class Patient:
    """Waits for the messages after a reply for longer than the suite's 0.1 s."""

    def execute_helper(self, code, timeout=180, **options):
        channel = self.kc.iopub_channel
        get = jupyter_kernel_test.ensure_sync(channel.get_msg)
        channel.get_msg = lambda timeout: get(timeout=180)
        try:
            return super().execute_helper(code, timeout, **options)
        finally:
            del channel.get_msg


class Python(Patient, jupyter_kernel_test.KernelTests):
    kernel_name = "ryokan-python"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    code_execute_result = [
        {"code": "6 * 7", "result": "42"},
        {"code": "'a' * 3", "result": "'aaa'"},
    ]
    code_display_data = [
        {"code": "class P:\n    def _repr_png_(self): return b'\\x89PNG'\ndisplay(P())", "mime": "image/png"},
    ]
    code_generate_error = "raise ValueError('no')"
    completion_samples = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples = ["1", "print('hello')", "def f(x):\n  return x\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):"]
    invalid_code_samples = ["import = 7q"]
    code_inspect_sample = "inspected"

    def test_inspect(self):
        self.flush_channels()
        self.execute_helper("inspected = [1, 2]")
        super().test_inspect()

    def test_error_has_traceback(self):
        self.flush_channels()
        reply, messages = self.execute_helper("def f():\n    1 / 0\nf()")
        self.assertEqual((reply["content"]["ename"], reply["content"]["evalue"]), ("ZeroDivisionError", "division by zero"))
        self.assertIn("in f", "\n".join(reply["content"]["traceback"]))
        self.assertEqual([message["msg_type"] for message in messages], ["error"], "the traceback is not shown twice")

    def test_scripts_are_withheld(self):
        code = "class H:\n    def _repr_html_(self): return '<script>1</script>'\n    def __repr__(self): return 'plain'\n"
        for shown in ("display(H())", "H()"):
            self.flush_channels()
            _, messages = self.execute_helper(code + shown)
            (message,) = messages
            self.assertEqual(message["content"]["data"], {"text/plain": "plain"})

    def test_failed_cell_aborts_queue(self):
        self.flush_channels()
        first = self.kc.execute("1 / 0")
        second = self.kc.execute("print('never')")
        replies = {}
        while len(replies) < 2:
            reply = self.kc.get_shell_msg(timeout=180)
            replies[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
        self.assertEqual((replies[first], replies[second]), ("error", "aborted"))


class Bash(Patient, jupyter_kernel_test.KernelTests):
    kernel_name = "ryokan-bash"
    language_name = "bash"
    file_extension = ".sh"
    code_hello_world = "echo 'hello, world'"
    code_stderr = "echo test >&2"
    code_generate_error = "false"
    complete_code_samples = ["echo 1"]
    incomplete_code_samples = ["if true; then"]


class Notebooks(unittest.TestCase):
    def run_cells(self, *cells, **options):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        client = NotebookClient(notebook, kernel_name="ryokan-python", timeout=300, **options)
        client.execute()
        return [cell.outputs for cell in notebook.cells]

    def test_notebook_runs(self):
        before = kernels()
        outputs = self.run_cells("x = 20", "import time\nfor n in range(3):\n    print(n, flush=True)\n    time.sleep(0.05)", "x + 1")
        self.assertEqual(outputs[0], [])
        self.assertEqual("".join(output.text for output in outputs[1]), "0\n1\n2\n")
        self.assertEqual(outputs[2][0].data, {"text/plain": "21"})
        self.assertEqual(kernels(), before, "its kernel is removed with it")
        with self.assertRaises(CellExecutionError):
            self.run_cells("1 / 0")

    def manager(self, kernel_name, **options):
        manager = KernelManager(kernel_name=kernel_name, **options)
        manager.start_kernel()
        self.addCleanup(manager.cleanup_resources)
        client = manager.client()
        client.start_channels()
        self.addCleanup(client.stop_channels)
        client.wait_for_ready(timeout=180)
        self.addCleanup(lambda: manager.is_alive() and manager.shutdown_kernel())
        return manager, client

    def say(self, client, code):
        said = []

        def hook(message):
            content = message["content"]
            said.append(content.get("text") or content.get("data", {}).get("text/plain") or "")

        reply = client.execute_interactive(code, timeout=300, output_hook=hook)
        return reply["content"]["status"], "".join(said)

    def test_input_is_asked(self):
        manager, client = self.manager("ryokan-python")
        asked = []

        def answer(message):
            asked.append(message["content"])
            client.input(["blue", "42"][len(asked) - 1])

        code = "name = input('colour? ')\nnumber = int(input())\nprint(name, number)"
        said = []
        hook = lambda message: said.append(message["content"].get("text", ""))
        reply = client.execute_interactive(code, allow_stdin=True, timeout=300, output_hook=hook, stdin_hook=answer)
        self.assertEqual((reply["content"]["status"], "".join(said)), ("ok", "colour? blue 42\n"))
        self.assertEqual(asked, [{"prompt": "", "password": False}] * 2)
        # Without a person to ask nothing hangs, and the error says why.
        reply = client.execute_interactive("input('x')", allow_stdin=False, timeout=300, output_hook=hook)
        self.assertEqual(reply["content"]["ename"], "StdinNotGiven")
        # What cannot be asked for line by line is refused, and programs get no input.
        code = "import subprocess, sys\nassert subprocess.run(['cat'], capture_output=True).stdout == b''\nsys.stdin.read()"
        reply = client.execute_interactive(code, allow_stdin=True, timeout=300, output_hook=hook, stdin_hook=answer)
        self.assertEqual(reply["content"]["ename"], "StdinNotGiven")
        # An interrupt ends the question; a late answer is dropped.
        waiting = client.execute("input()", allow_stdin=True)
        client.get_stdin_msg(timeout=180)
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=180))["parent_header"]["msg_id"] != waiting:
            pass
        self.assertEqual(reply["content"]["ename"], "KeyboardInterrupt")
        client.input("late")
        self.assertEqual(self.say(client, "1 + 1"), ("ok", "2"))

    def test_shell_input_ends_at_once(self):
        _, client = self.manager("ryokan-bash")
        self.assertEqual(self.say(client, "read x; echo code $?"), ("ok", "code 1\n"))

    def test_named_kernel_survives(self):
        manager, client = self.manager("ryokan-python-demo", transport="ipc")
        for port in (manager.shell_port, manager.iopub_port):
            self.assertEqual(os.stat(f"{manager.ip}-{port}").st_mode & 0o777, 0o600)
        self.assertEqual(self.say(client, "kept = 1; open('kept', 'w').close()"), ("ok", ""))
        ryokan("checkpoint", "demo", "-m", "one")
        self.say(client, "kept = 2")
        ryokan("restore", "demo", "one", "--yes")
        self.assertEqual(self.say(client, "kept"), ("ok", "1"))
        manager.shutdown_kernel()
        self.assertFalse(manager.is_alive())
        self.assertIn("demo", kernels())
        manager, client = self.manager("ryokan-python-demo")
        self.assertEqual(self.say(client, "kept"), ("ok", "1"))
        manager.restart_kernel()
        client.wait_for_ready(timeout=180)
        status, _ = self.say(client, "kept")
        self.assertEqual(status, "error", "a restart clears the variables")
        self.assertEqual(self.say(client, "import os; os.listdir()"), ("ok", "['kept']"))

    def test_restart_gives_new_interpreter(self):
        manager, client = self.manager("ryokan-python")
        write = "open('edited.py', 'w').write('value = %s')"
        code = f"import subprocess, sys, threading, time\nsys.path.insert(0, '')\n{write % 1}\nimport edited\n{write % 22}\n"
        code += "threading.Thread(target=time.sleep, args=[600], name='left', daemon=True).start()\n"
        code += "child = subprocess.Popen(['sleep', '600']).pid; sys.left = child; del child"
        self.assertEqual(self.say(client, code)[0], "ok")
        manager.restart_kernel()
        client.wait_for_ready(timeout=180)
        code = "import os, sys, threading\nsys.path.insert(0, '')\nimport edited\n"
        code += "sleeps = [pid for pid in os.listdir('/proc') if pid.isdigit() and open(f'/proc/{pid}/comm').read() == 'sleep\\n']\n"
        code += "print(edited.value, hasattr(sys, 'left'), [t.name for t in threading.enumerate() if t.name == 'left'], sleeps)"
        self.assertEqual(self.say(client, code), ("ok", "22 False [] []\n"))

    def test_cell_outlives_daemon(self):
        _, client = self.manager("ryokan-python")
        code = "import time\nfor n in range(40):\n    print(n, flush=True)\n    time.sleep(0.1)\n'end'"
        killed = []

        def hook(message):
            content = message["content"]
            said.append(content.get("text") or content.get("data", {}).get("text/plain") or "")
            if not killed and "5\n" in "".join(said):
                killed.append(json.loads(ryokan("daemon", "status", "--json"))["pid"])
                os.kill(killed[0], signal.SIGKILL)

        said = []
        reply = client.execute_interactive(code, timeout=300, output_hook=hook)
        self.assertEqual(reply["content"]["status"], "ok", reply["content"])
        self.assertTrue(killed)
        self.assertEqual("".join(said), "".join(f"{n}\n" for n in range(40)) + "'end'")
        self.assertEqual(self.say(client, "n"), ("ok", "39"))

    def test_interrupt_ends_cell(self):
        manager, client = self.manager("ryokan-python")
        begun = time.monotonic()
        waiting = client.execute("import time; print('on', flush=True); time.sleep(600)")
        while client.get_iopub_msg(timeout=180)["msg_type"] != "stream":
            pass
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=180))["parent_header"]["msg_id"] != waiting:
            pass
        self.assertEqual((reply["content"]["status"], reply["content"]["ename"]), ("error", "KeyboardInterrupt"))
        self.assertLess(time.monotonic() - begun, 300)
        self.assertEqual(self.say(client, "1 + 1"), ("ok", "2"))

    def runs(self, pid):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
        except FileNotFoundError:
            return False

    def test_bridge_ends_with_its_parent(self):
        code = "import sys; from jupyter_client.manager import KernelManager as M\nm = M(kernel_name='ryokan-python'); m.start_kernel(); print(m.provisioner.pid, flush=True); sys.stdin.read()"
        before = kernels()
        parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        bridge = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
        for _ in range(1800):
            if not self.runs(bridge) and kernels() == before:
                return
            time.sleep(0.1)
        self.fail(f"the bridge runs on, or its kernel: {kernels()}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
