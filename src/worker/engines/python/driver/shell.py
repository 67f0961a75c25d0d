"""An interruptible os.system: libc's ignores SIGINT while it waits."""
import os


def system(command):
    """Runs a shell command and returns its wait status. An interrupt reaches the command first."""
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", os.fsdecode(command)], os.environ, setsigdef=[2, 3])
    try:
        return os.waitpid(pid, 0)[1]
    except BaseException:
        _end(pid)
        raise


def _end(pid):
    import time

    for number, patience_s in ((2, 0.25), (9, 1.0)):
        os.kill(pid, number)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.005)


def install():
    """Replaces os.system, under that name."""
    system.__module__, system.__qualname__ = "os", "system"
    os.system = system
