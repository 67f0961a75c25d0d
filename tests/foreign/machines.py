"""Forks and differences of a running virtual machine through both faces of the Python package."""

import asyncio

import ryokan
from ryokan import aio

# No checkpoint can save it: it is there in copies of the memory only.
READ = "next(numbers)"


def changes(differences):
    return {(one.area, one.change, one.name) for one in differences}


WANTED = {("state", "changed", "var/saved"), ("file", "added", "new")}

with ryokan.Host.connect(start=False) as host:
    lab = host.get("lab")
    forks = lab.fork("copy", count=2)
    assert [one.name for one in forks] == ["copy-1", "copy-2"], forks
    assert [one.run_code(READ).check().value for one in forks] == [1, 1]
    forks[0].run_code("saved = 43; open('new', 'w').write('new')").check()
    found = changes(lab.diff("", other=forks[0]))
    assert WANTED <= found, found
    assert not WANTED & changes(lab.diff("", other=forks[1]))


async def main():
    async with aio.Host.connect(start=False) as host:
        lab = await host.get("lab")
        (fork,) = await lab.fork("later")
        results = [await one.run_code(READ) for one in (fork, await host.get("copy-1"))]
        assert [result.check().value for result in results] == [1, 2], results
        found = changes(await lab.diff("", other=await host.get("copy-1")))
        assert WANTED <= found, found


asyncio.run(main())
print("copied and compared")
