"""python -m sglcache.fuzzing [--decoder NAME ...] [--count N] [--seed S] [--first N]

Feed decoders bad input in this process. Without names: all of them, N inputs in total. Exits 1 at the first failure of
each decoder, with its input and how to have it again.
"""

from __future__ import annotations

import argparse
import logging
import sys

from sglcache.fuzzing.decoders import DECODERS
from sglcache.testing import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sglcache.fuzzing", description=__doc__)
    parser.add_argument("--decoder", action="append", choices=[each.name for each in DECODERS])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    chosen = [each for each in DECODERS if options.decoder is None or each.name in options.decoder]
    total = sum(each.weight for each in chosen)
    code, inputs = 0, 0
    for each in chosen:
        count = options.count if options.decoder else max(1, round(options.count * each.weight / total))
        try:
            report = fuzz.run(each, count, options.seed, options.first)
        except fuzz.Broken as exc:
            print(f"BROKEN {exc}", flush=True)
            code = 1
            continue
        inputs += report.inputs
        print(report, flush=True)
    print(f"{inputs} inputs of seed {options.seed}")
    return code


if __name__ == "__main__":
    sys.exit(main())
