#!/bin/sh
# Three attempts from one state, side by side; the files of the best one are taken over.
set -eu

ryokan new task --engine python
ryokan exec task 'words = ["pear", "fig", "apple"]; open("result.txt", "w").write("unsorted")'
ryokan fork task try --count 3

ryokan exec try-1 'open("result.txt", "w").write(" ".join(sorted(words)))' &
ryokan exec try-2 'open("result.txt", "w").write(" ".join(sorted(words, key=len)))' &
ryokan exec try-3 'raise RuntimeError("this attempt fails")' &
wait

# The judge: the first attempt whose result begins with the shortest word.
best=
for try in try-1 try-2 try-3; do
    case $(ryokan cp "$try:result.txt" -) in
        fig*) best=$try; break ;;
    esac
done
echo "best: $best"
ryokan diff task --with "$best" -p -- result.txt
ryokan take task --from "$best"
ryokan exec task 'print(open("result.txt").read())'

ryokan rm --yes try-1 try-2 try-3 task
