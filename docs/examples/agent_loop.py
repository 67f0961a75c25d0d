"""An agent's loop: run a step, check the result, go back if it made things worse.

`proposals` stands for the model: any source of code that reads the results.
"""

import ryokan

proposals = [
    "total = sum(prices)",
    "import os; os.remove('prices.txt'); prices = []; total = 0",  # a mistake
    "print(f'total {total:.2f}')",
]
SETUP = "prices = [19.9, 5.0, 12.5]; open('prices.txt', 'w').write(repr(prices))"
CHECK = "import os; assert os.path.exists('prices.txt') and prices and total > 0"

with ryokan.Host.connect() as host:
    kernel = host.create("agent", engine="python", memory_bytes=256 << 20)
    kernel.run_code(SETUP).check()
    for number, code in enumerate(proposals, 1):
        kernel.checkpoint(f"before step {number}")
        kernel.message("assistant", code)  # in the journal, beside the execution
        result = kernel.run_code(code, timeout=30)
        passed = result.exit_code == 0 and kernel.run_code(CHECK).exit_code == 0
        if not passed:
            # Variables and files together; the model learns what happened.
            kernel.restore(f"before step {number}")
            kernel.message("user", f"step {number} was undone")
        print(number, "kept" if passed else "undone", result.stdout.strip())
    print(kernel.get_var("prices"), kernel.files.exists("prices.txt"))
    kernel.remove()
