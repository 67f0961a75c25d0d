"""Dynamic tools: the builtin object `tools`, through which code calls the tools of the kernel's MCP servers.

Owns the list of tools that init announced and the calls under way. Any thread may call while an execution runs; one
waiting thread at a time reads the socket. Late answers are dropped.
"""
from _thread import allocate_lock

from _ryokan import gate, rich, values, wire

_announced = {}
_waiting = {}
_last_call = 0
_reading = allocate_lock()
_POLL_MS = 20


class ToolError(RuntimeError):
    """A tool call failed; the message is the tool's."""

    __module__ = "builtins"


class Tools:
    """The current tools: `tools.server.tool(name=value)`, `tools["server__tool"](…)`, `tools.list()`."""

    def list(self):
        """Every tool: name, description and the JSON schema of its arguments."""
        return [dict(tool) for tool in _announced.values()]

    def __getitem__(self, name):
        if name not in _announced:
            known = ", ".join(sorted(_announced)[:20]) or "none"
            raise KeyError(f"there is no tool {name!r}; there are: {known}")
        return _Tool(name)

    def __getattr__(self, server):
        if server.startswith("__") or not any(name.startswith(server + "__") for name in _announced):
            known = ", ".join(self.__dir__()) or "none"
            raise AttributeError(f"there is no tool server {server!r}; there are: {known}")
        return _Server(server)

    def __dir__(self):
        return sorted({name.split("__", 1)[0] for name in _announced} | {"list"})

    def __repr__(self):
        return f"<tools: {len(_announced)}>"

    def __reduce__(self):
        return _the_tools, ()


def _the_tools():
    return tools


class _Server:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, tool):
        name = f"{self._name}__{tool}"
        if name not in _announced:
            known = ", ".join(self.__dir__())
            raise AttributeError(f"server {self._name!r} has no tool {tool!r}; it has: {known}")
        return _Tool(name)

    def __dir__(self):
        prefix = self._name + "__"
        return sorted(name[len(prefix) :] for name in _announced if name.startswith(prefix))

    def __repr__(self):
        return f"<tools of {self._name}: {', '.join(self.__dir__())}>"


class _Tool:
    def __init__(self, name):
        self.__name__ = name
        self.__doc__ = _announced[name].get("description", "")

    def __call__(self, *positional, **arguments):
        if positional:
            raise TypeError(f"{self.__name__} takes named arguments only")
        return _call(self.__name__, arguments)

    def __repr__(self):
        return f"<tool {self.__name__}: {(self.__doc__ or '').strip().splitlines()[:1]}>"


tools = Tools()


def announce(listed):
    """Sets the current tools from init's list."""
    _announced.clear()
    for tool in listed:
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            _announced[tool["name"]] = tool


def announced(name):
    """Whether a tool of that name exists."""
    return name in _announced


def _call(name, arguments):
    global _last_call
    if not wire.alive():
        raise ToolError("a forked child cannot call tools")
    if rich.current_exec is None:
        raise ToolError("tools can be called only while an execution runs")
    try:
        encoded = values.encode(arguments)
    except values.TooLarge:
        raise ToolError(f"the arguments are beyond {values.BYTES_MAX} bytes") from None
    _last_call += 1
    call = _last_call
    _waiting[call] = None
    try:
        wire.send({"ev": "tool_call", "call": call, "exec": rich.current_exec, "name": name, "args": encoded})
        _wait(call)
        answer = _waiting[call]
    finally:
        _waiting.pop(call, None)
    if answer is None:
        raise ToolError("the execution ended before the tool answered")
    if answer.get("ok") is not True:
        raise ToolError(str(answer.get("message") or "the tool failed"))
    result = values.decode(answer.get("value"))
    return answer.get("text") or None if result is None else result


def _wait(call):
    import select

    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    exec_id = rich.current_exec
    while _waiting[call] is None and rich.current_exec == exec_id:
        if not _reading.acquire(True, _POLL_MS / 1000):
            continue
        mine = _reading
        try:
            # Interruptible here, where no byte can be lost; not while a frame is read.
            if not wire.buffered() and not poll.poll(_POLL_MS if gate.get_ident() != gate.main_thread else 1000):
                continue
            if _waiting[call] is not None or rich.current_exec != exec_id:
                continue
            gate.hold()
            try:
                frame, _ = wire.receive()
                take(frame)
            finally:
                gate.release()
        finally:
            if mine.locked():
                mine.release()


def take(frame):
    """Passes a `tool_result` to its call, or drops it if the call has ended."""
    call = frame.get("call")
    if call in _waiting:
        _waiting[call] = frame


def settle():
    """After an execution: stops reading the socket in threads. Free when no call is pending."""
    global _reading
    if _waiting:
        _reading.acquire(True, 1)
        _reading = allocate_lock()
    elif _reading.locked():  # an interrupt arrived between taking the lock and guarding it
        _reading = allocate_lock()
