"""A notebook whose code runs in the kernel `analysis`, which outlives it.

Once before: `ryokan jupyter install --kernel analysis`.
"""

import subprocess

import nbformat
from nbclient import NotebookClient


def run(*cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="ryokan-python-analysis", timeout=120).execute()
    return [output.get("data", {}).get("text/plain") for cell in notebook.cells for output in cell.outputs]


run("rows = [3, 1, 4]", "open('rows.txt', 'w').write(repr(rows))")
subprocess.run(["ryokan", "checkpoint", "analysis", "-m", "loaded"], check=True, stdout=subprocess.DEVNULL)
print(run("rows.clear(); rows"))  # ['[]']
subprocess.run(["ryokan", "restore", "analysis", "loaded", "--yes"], check=True, stdout=subprocess.DEVNULL)
print(run("sorted(rows)"))  # ['[1, 3, 4]']
subprocess.run(["ryokan", "rm", "analysis", "--yes"], check=True, stdout=subprocess.DEVNULL)
