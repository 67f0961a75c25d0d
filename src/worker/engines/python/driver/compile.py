# The text given to `python3 -I -S -c` to compile the driver: sources come as JSON on standard input, code goes to standard output.
import importlib.util, json, marshal, sys

sources = json.load(sys.stdin)
codes = {
    name: marshal.dumps(compile(source, f"<ryokan/{name}.py>", "exec", dont_inherit=True, optimize=2))
    for name, source in sources.items()
}
sys.stdout.buffer.write(importlib.util.MAGIC_NUMBER + marshal.dumps(codes))
