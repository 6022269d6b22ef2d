"""`sglcache torture`: runners on a real daemon, seeded faults, and checks that nothing is lost, leaked or stuck.

    run.py       what happens when: starts the daemon and the runners, does the faults, and says what came of it
    daemon.py    the daemon that is tortured: its configuration, its lives, what the kernel says of its processes
    rank.py      how its ranks are started: as ever, with a few seams open to faults
    board.py     words in shared memory: what runners do now, and what is wanted of runners and ranks
    work.py      the prompts, from a seed, and what each page of them is to hold
    runner.py    a model runner's process, single, or a scheduler with a worker for each shard
    schedule.py  which fault comes when: from a seed, or from a file
    faults.py    the faults, each a class with a name
    audit.py     what is checked all along and at the end, of each rank
    report.py    what came of it, for people and programs

It touches no daemon but its own, and ends no process but those that it started.
"""
