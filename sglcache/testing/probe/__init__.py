"""The questions that `scripts/gpu_probe.py` asks of a card, in real processes.

    stage.py    processes, each with a context of its own, and what they are asked; and no wait without end
    tasks.py    what more than one question needs: pools, words in shared memory
    memory.py   (a) memory that another process maps; (d) what is left of it after deaths
    order.py    (b) events, and words that streams write and wait for
    death.py    (c) a process that dies while its kernel writes
    copies.py   (e) copies beside a process that decodes; (f) what calls cost

A question is a function of a `Stage`, a `Tell` and `Sizes`. It tells what it found as it goes, so one that hangs has
told of what came before.
"""
